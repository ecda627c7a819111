"""The examples of AutoChunk run in seconds and say what they saved."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "autochunk"


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(str(FOLDER / script), run_name="__main__")


def test_a_fold_block_within_a_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--residues", "24", "--sequences", "8", "--max-memory", "4MiB"
    run(monkeypatch, "fold_block.py", *words)
    out = capsys.readouterr().out
    assert "saved" in out and "slices" in out
    assert float(out.split("largest difference: ")[1]) < 1e-4


def test_a_long_prefill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the transformers extra is missing")
    run(monkeypatch, "long_prefill.py", "--max-memory", "2MiB", "--max-slowdown", "9")
    out = capsys.readouterr().out
    tokens = int(out.split("2MiB: ")[1].split()[0])
    assert tokens >= 256
    assert f"last hidden state: (1, {tokens}, 96)" in out
