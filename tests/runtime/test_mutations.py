"""Faults put in on purpose: each must be noticed, or the exactness tests prove nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import cases
from tests.cases import Case, assert_exact, run_case
from wf_backends.lowering.derivation import lower
from wf_backends.lowering.program import Exchange
from wf_backends.runtime import attention as executor
from wf_backends.runtime.runner import _RunningPass
from wf_backends.schedule.layout import zigzag
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.routes import concentric, ring

CAUSAL_RING = Case(ring(4), ring(4), zigzag(4, 32), Mask(CAUSAL))
TEAMS = Case(concentric(4, 2), concentric(4, 2), zigzag(4, 32), Mask(CAUSAL))


def with_plans(monkeypatch, change):
    """Run what `change(plan)` makes of every rank's plan."""
    monkeypatch.setattr(cases, "lower", lambda problem, rank: change(lower(problem, rank)))


def with_rounds(plan, change):
    """The plan with every round of every step changed."""
    steps = (replace(s, rounds=tuple(map(change, s.rounds))) for s in plan.steps)
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("case", (CAUSAL_RING, TEAMS), ids=("ring", "concentric"))
def test_unchanged_plans_pass(monkeypatch, case):
    with_plans(monkeypatch, lambda plan: plan)
    assert_exact(case)


def test_a_dropped_hop_is_noticed():
    short = replace(ring(4), hops=ring(4).hops[:-1])
    assert run_case(replace(CAUSAL_RING, forward=short)).errors["out"] > 1e-3
    assert run_case(replace(CAUSAL_RING, backward=short)).errors["dk"] > 1e-3


def test_a_wrong_band_is_noticed(monkeypatch):
    def widen(tile):
        return replace(tile, band=Band(tile.band.left, tile.band.right + 1))

    def change(one):
        return replace(one, tiles=tuple(map(widen, one.tiles)))

    with_plans(monkeypatch, lambda plan: with_rounds(plan, change))
    assert run_case(CAUSAL_RING).errors["out"] > 1e-3


def test_a_missing_way_home_is_noticed(monkeypatch):
    """Partial gradients stay where they are, as if their owner had none to come."""
    with_plans(
        monkeypatch,
        lambda plan: replace(
            plan,
            steps=tuple(
                replace(
                    step,
                    home_out=tuple(p for p in step.home_out if p.peer == plan.rank),
                    home_in=tuple(p for p in step.home_in if p.peer == plan.rank),
                )
                for step in plan.steps
            ),
        ),
    )
    errors = run_case(CAUSAL_RING).errors
    assert errors["out"] < 1e-10 and errors["dk"] > 1e-3 and errors["dv"] > 1e-3


def test_partial_outputs_that_stay_away_are_noticed(monkeypatch):
    with_plans(
        monkeypatch,
        lambda plan: with_rounds(plan, lambda one: replace(one, home=Exchange())),
    )
    assert run_case(TEAMS).errors["out"] > 1e-3


def test_queries_that_are_used_before_they_are_there_are_noticed(monkeypatch):
    fetch = _RunningPass._fetch
    monkeypatch.setattr(_RunningPass, "_fetch", lambda *args: fetch(*args) and None)  # nobody waits
    assert not run_case(TEAMS).worst < 1e-3  # memory that nobody wrote may hold NaN


def test_a_merge_that_forgets_the_lse_is_noticed(monkeypatch):
    def average(out, lse, block_out, block_lse):
        out.lerp_(block_out, 0.5)
        lse.copy_(block_lse)

    monkeypatch.setattr(executor, "merge", average)
    assert run_case(CAUSAL_RING).errors["out"] > 1e-3


def test_a_factor_two_in_the_gradients_is_noticed(monkeypatch):
    def twice(targets, values):
        for target, value in zip(targets, values, strict=True):
            target.add_(2 * value)

    monkeypatch.setattr(executor, "add", twice)
    errors = run_case(CAUSAL_RING).errors
    assert errors["dk"] > 1e-3 and errors["out"] < 1e-10
