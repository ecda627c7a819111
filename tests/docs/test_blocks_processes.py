"""Every Python block of the README and of docs/ runs, on four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import blocks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.integrations import colossalai_jobs  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402

RANKS = 4
RUN = [block for block in blocks("python") if block.runs]
ENGINES = ("wf_deepspeed", "wf_colossalai", "wf_accelerate")  # whose state stays in a process

pytestmark = pytest.mark.processes


def scripts(page: str) -> list[tuple[str, list[str], str]]:
    """(where it stands, names that are given, source) of a page; what continues is joined."""
    found: list[tuple[str, list[str], str]] = []
    for block in (block for block in RUN if block.page == page):
        if block.test == "continues":
            where, given, source = found.pop()
            found.append((where, given, f"{source}\n{block.text}"))
        else:
            found.append((block.name, block.given, block.text))
    return found


def jobs() -> dict[str, list[str]]:
    """Pages by the engines that they use: those of one kind run one after another in one job."""
    found: dict[str, list[str]] = {}
    for page in dict.fromkeys(block.page for block in RUN):
        source = "".join(block.text for block in RUN if block.page == page)
        engines = " ".join(name for name in ENGINES if name in source) or "torch"
        found.setdefault(engines, []).append(page)
    return found


def write_files(pages: list[str], folder: Path) -> None:
    """The files that blocks of these pages are."""
    for block in (block for block in blocks("json") if block.page in pages):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


@pytest.mark.parametrize(("engines", "pages"), jobs().items(), ids=list(jobs()))
def test_python_blocks_run(engines: str, pages: list[str], tmp_path: Path):
    if "colossalai" in engines:
        pytest.importorskip("colossalai", reason="ColossalAI is not installed")
    write_files(pages, tmp_path)
    every = [script for page in pages for script in scripts(page)]
    (tmp_path / "scripts.json").write_text(json.dumps(every))
    imported = [colossalai_jobs.IMPORTED] if "colossalai" in engines else []
    command = ["-m", "tests.docs.run_blocks", str(tmp_path)]
    run_ranks(command, RANKS, timeout=120, imported=imported)
