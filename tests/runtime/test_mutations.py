"""Faults put into schedules, programs and the runtime: `run_case` must show an error for each."""

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


def change_programs(monkeypatch, change):
    """Every rank runs `change(program)`."""
    monkeypatch.setattr(cases, "lower", lambda problem, rank: change(lower(problem, rank)))


def change_rounds(program, change):
    """The program with `change(round)` for every round of every step."""
    steps = (replace(step, rounds=tuple(map(change, step.rounds))) for step in program.steps)
    return replace(program, steps=tuple(steps))


@pytest.mark.parametrize("case", (CAUSAL_RING, TEAMS), ids=("ring", "concentric"))
def test_unchanged_programs_are_exact(monkeypatch, case):
    change_programs(monkeypatch, lambda program: program)
    assert_exact(case)


def test_a_missing_hop_is_an_error():
    short = replace(ring(4), hops=ring(4).hops[:-1])
    assert run_case(replace(CAUSAL_RING, forward=short)).errors["out"] > 1e-3
    assert run_case(replace(CAUSAL_RING, backward=short)).errors["dk"] > 1e-3


def test_a_band_too_wide_by_one_key_is_an_error(monkeypatch):
    def widen_tile(tile):
        return replace(tile, band=Band(tile.band.left, tile.band.right + 1))

    def widen_round(round_):
        return replace(round_, tiles=tuple(map(widen_tile, round_.tiles)))

    change_programs(monkeypatch, lambda program: change_rounds(program, widen_round))
    assert run_case(CAUSAL_RING).errors["out"] > 1e-3


def test_gradients_that_are_not_sent_to_their_owner_are_an_error(monkeypatch):
    def keep_results(step, rank):
        """The step without results to and from other ranks."""
        send, receive = (
            tuple(parcel for parcel in parcels if parcel.peer == rank)
            for parcels in (step.reduce.send, step.reduce.receive)
        )
        return replace(step, reduce=Exchange(send, receive))

    def keep_all_results(program):
        steps = tuple(keep_results(step, program.rank) for step in program.steps)
        return replace(program, steps=steps)

    change_programs(monkeypatch, keep_all_results)
    errors = run_case(CAUSAL_RING).errors
    assert errors["out"] < 1e-10 and errors["dk"] > 1e-3 and errors["dv"] > 1e-3


def test_partial_outputs_that_are_not_sent_to_their_owner_are_an_error(monkeypatch):
    def without_reduce(program):
        return change_rounds(program, lambda round_: replace(round_, reduce=Exchange()))

    change_programs(monkeypatch, without_reduce)
    assert run_case(TEAMS).errors["out"] > 1e-3


def test_queries_that_are_read_before_they_arrive_are_an_error(monkeypatch):
    """A fetch returns what to wait for; here nobody waits. Memory not yet written may hold NaN."""
    fetch = _RunningPass._fetch
    monkeypatch.setattr(_RunningPass, "_fetch", lambda *args: fetch(*args) and None)
    assert not run_case(TEAMS).worst < 1e-3


def test_a_merge_without_the_weights_of_lse_is_an_error(monkeypatch):
    def average(out, lse, block_out, block_lse):
        out.lerp_(block_out, 0.5)
        lse.copy_(block_lse)

    monkeypatch.setattr(executor, "merge", average)
    assert run_case(CAUSAL_RING).errors["out"] > 1e-3


def test_gradients_that_are_added_twice_are_an_error(monkeypatch):
    def add_twice(targets, values):
        for target, value in zip(targets, values, strict=True):
            target.add_(2 * value)

    monkeypatch.setattr(executor, "add", add_twice)
    errors = run_case(CAUSAL_RING).errors
    assert errors["dk"] > 1e-3 and errors["out"] < 1e-10
