"""Files, modules and attributes that the README and docs/ name in backticks exist."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, inline

FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|sh|md|json|toml|txt)|[\w-]+(/[\w.-]+)+/?")
NAME = re.compile(r"\bwf_\w+(?:\.\w+)*")
FILES_OF_READERS = {  # or written by a job
    *("config.json", "ds.json", "my_cluster.toml", "script.py"),
    *("topology.json", "trace.json", "train.py"),
}
FOLDERS = ("", "wf_backends", "integrations", "docs")  # to which paths may be relative


@cache
def file_names() -> set[str]:
    """Names of all files of the repository."""
    folders = ("wf_backends", "integrations", "tests", "examples", "benchmarks", "configs", "docs")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {path.name for path in (*paths, *ROOT.iterdir())}


def exists(path: str) -> bool:
    """Whether the path exists, relative to one of FOLDERS; a name alone stands for any file."""
    if "/" not in path.rstrip("/"):
        return path in file_names() or (ROOT / path).exists()
    return any((ROOT / folder / path).exists() for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str):
    codes = {code for code in inline(page) if FILE.fullmatch(code)}
    top_names = {path.name for folder in FOLDERS for path in (ROOT / folder).iterdir()}
    paths = {code for code in codes if "/" not in code or code.split("/")[0] in top_names}
    assert not {path for path in paths - FILES_OF_READERS if not exists(path)}


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str):
    texts = [*inline(page), *(block.text for block in blocks("python") if block.page == page)]
    names = {name for text in texts for name in NAME.findall(text)}
    assert not {name for name in names if not resolves(name)}


@cache
def resolves(name: str) -> bool:
    """Whether `wf_package.module.attribute` can be imported and has the attribute."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("wf_"):
                return True  # a framework that is not installed
            continue
        for attribute in parts[length:]:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False
