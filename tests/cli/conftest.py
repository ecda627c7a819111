"""The console script as a function of its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from wf_backends import planner

CACHED = {name: cache(getattr(planner, name)) for name in ("all_plans", "best_plan", "plan_for")}
"""Functions of the planner, which are pure: many tests ask for the same plans."""


@pytest.fixture(autouse=True)
def _cached_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from wf_backends.cli import plan

    for name, function in CACHED.items():
        monkeypatch.setattr(plan, name, function)


@pytest.fixture(name="wallfacer")
def _wallfacer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`wallfacer("plan", "--top", "1", columns=80)` is (exit code, stdout, stderr)."""
    from tests.command_line import run  # skips where typer is missing

    return lambda *args, columns=200: run(list(args), monkeypatch, capfd, columns)


@pytest.fixture(name="wallfacer_json")
def _wallfacer_json(wallfacer: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """`wallfacer_json("plan", "--top", "1")` is what `wallfacer plan --top 1 --json` prints."""

    def run_json(*args: str) -> Any:
        code, out, err = wallfacer(*args, "--json")
        assert code == 0, err
        return json.loads(out)

    return run_json
