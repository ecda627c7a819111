"""The console script as a function of its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(name="wallfacer")
def _wallfacer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`wallfacer("plan", "--top", "1", columns=80)` is (exit code, stdout, stderr)."""
    from tests.command_line import run  # skips where typer is missing

    return lambda *args, **words: run(list(args), monkeypatch, capfd, **words)
