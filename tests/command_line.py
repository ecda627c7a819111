"""What tests of the console script share: a way to run it, a small model and two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wf_backends.cli import main

pytest.importorskip("typer", reason="the cli extra is not installed")

SMALL = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--seqlen", "8192"]
TWO_HOSTS = str(Path(__file__).parents[1] / "configs/topologies/two_hosts.toml")


def run(
    args: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    columns: int = 200,
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `wallfacer ARGS` on a terminal with that many columns."""
    monkeypatch.setattr(sys, "argv", ["wallfacer", *args])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err
