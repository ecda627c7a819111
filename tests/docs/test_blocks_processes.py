"""Every Python block of the README and of docs/ runs on four ranks, without an error."""

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
ENGINES = ("wf_deepspeed", "wf_colossalai", "wf_accelerate")  # each changes its process for good

pytestmark = pytest.mark.processes


def scripts(page: str) -> list[tuple[str, list[str], str]]:
    """(page:line, given variables, source) of each script: a block and those that continue it."""
    joined: list[tuple[str, list[str], str]] = []
    for block in (block for block in RUN if block.page == page):
        if block.test == "continues":
            name, given, source = joined.pop()
            joined.append((name, given, f"{source}\n{block.text}"))
        else:
            joined.append((block.name, block.given, block.text))
    return joined


def jobs() -> dict[str, list[str]]:
    """Engines -> the pages that use them, which run one after another in one job."""
    pages: dict[str, list[str]] = {}
    for page in dict.fromkeys(block.page for block in RUN):
        source = "".join(block.text for block in RUN if block.page == page)
        engines = " ".join(name for name in ENGINES if name in source) or "torch"
        pages.setdefault(engines, []).append(page)
    return pages


def write_files(pages: list[str], folder: Path) -> None:
    """Write the blocks of these pages that are files."""
    for block in (block for block in blocks("json") if block.page in pages):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


@pytest.mark.parametrize(("engines", "pages"), jobs().items(), ids=list(jobs()))
def test_python_blocks_run(engines: str, pages: list[str], tmp_path: Path):
    if "colossalai" in engines:
        pytest.importorskip("colossalai", reason="ColossalAI is not installed")
    write_files(pages, tmp_path)
    scripts_of_job = [script for page in pages for script in scripts(page)]
    (tmp_path / "scripts.json").write_text(json.dumps(scripts_of_job))
    imported = [colossalai_jobs.IMPORTED] if "colossalai" in engines else []
    command = ["-m", "tests.docs.run_blocks", str(tmp_path)]
    run_ranks(command, RANKS, timeout=120, imported=imported)
