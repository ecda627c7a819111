"""The documentation as a site: links lead to files, and the API page has the docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import LINK, PAGES, ROOT, without_blocks
from tests.helpers import run_command


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str):
    links = LINK.findall(without_blocks(PAGES[page]))
    paths = [link for link in links if not re.match(r"\w+:", link)]  # without https: and the like
    assert not [path for path in paths if not (ROOT / page).parent.joinpath(path).exists()]


def test_the_site_is_built_without_a_warning(tmp_path: Path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: the extra docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra docs")
    done = run_command([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)])
    assert not done.returncode, done.stdout
    api = (tmp_path / "api.html").read_text()
    assert "SequenceParallelConfig" in api and "softmax" in api
