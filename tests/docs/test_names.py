"""What the README and docs/ name in backticks exists: files, modules and what is in them."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, inline

FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|sh|md|json|toml|txt)|[\w-]+(/[\w.-]+)+/?")
NAME = re.compile(r"\bwf_\w+(?:\.\w+)*")
NO_FILES = ("torch/", "ui.", "and/", "out/", "ckpt/")
# Files of a reader's own, or of a job
OWN = {"ds.json", "train.py", "script.py", "topology.json", "my_cluster.toml", "trace.json"}
OWN |= {"config.json"}
FOLDERS = ("", "wf_backends", "integrations", "docs")


@cache
def file_names() -> set[str]:
    """Names of all files of the repository."""
    folders = ("wf_backends", "integrations", "tests", "examples", "benchmarks", "configs", "docs")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {path.name for path in (*paths, *ROOT.iterdir())}


def is_there(path: str) -> bool:
    """A path from the root, or from a folder of packages; a name alone stands for any file."""
    if "/" not in path.rstrip("/"):
        return path in file_names() or (ROOT / path).exists()
    return any((ROOT / folder / path).exists() for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str):
    found = {code for code in inline(page) if FILE.fullmatch(code)}
    tops = {path.name for folder in FOLDERS for path in (ROOT / folder).iterdir()}
    paths = {c for c in found if "/" not in c or c.split("/")[0] in tops}
    assert not {path for path in paths - OWN if not is_there(path)}


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str):
    code = [*inline(page), *(block.text for block in blocks("python") if block.page == page)]
    names = {name for text in code for name in NAME.findall(text)}
    assert not {name for name in names if not resolves(name)}


@cache
def resolves(name: str) -> bool:
    """Whether `wf_package.module.attribute` can be had."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("wf_"):
                return True  # a framework that is not installed
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False
