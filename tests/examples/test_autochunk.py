"""The examples of AutoChunk: they run in seconds, and print their memory and their error."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, script: str, *args: str) -> None:
    path = EXAMPLES / script
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [script, *args])
    runpy.run_path(str(path), run_name="__main__")


def test_fold_block_saves_memory_and_stays_exact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--residues", "24", "--sequences", "8", "--max-memory", "4MiB")
    run_example(monkeypatch, "fold/fold_block.py", *args)
    out = capsys.readouterr().out
    assert "saved" in out and "slices" in out
    assert float(out.split("largest difference: ")[1]) < 1e-4  # float32


def test_long_prefill_finds_the_longest_prompt_within_a_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the transformers extra is missing")
    run_example(monkeypatch, "long_prefill.py", "--max-memory", "2MiB", "--max-slowdown", "9")
    out = capsys.readouterr().out
    tokens = int(out.split("2MiB: ")[1].split()[0])
    assert tokens >= 256
    assert f"last hidden state: (1, {tokens}, 96)" in out
