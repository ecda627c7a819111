"""The console script as a function of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from wf_backends import planner

PURE = {name: cache(getattr(planner, name)) for name in ("all_plans", "best_plan", "plan_for")}


@pytest.fixture(autouse=True)
def _the_same_question_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests read the same plans, as a table or as JSON: the planner has no state."""
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from wf_backends.cli import plan

    for name, function in PURE.items():
        monkeypatch.setattr(plan, name, function)


@pytest.fixture(name="wallfacer")
def _wallfacer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`wallfacer("plan", "--top", "1", columns=80)` is (exit code, stdout, stderr)."""
    from tests.command_line import run  # skips where typer is missing

    return lambda *args, **words: run(list(args), monkeypatch, capfd, **words)
