"""In which direction walkers hop."""

from __future__ import annotations

import pytest

from tests.cases import schedules
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.problem import nearest_first
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.routes import double_ring, ring
from wf_backends.schedule.schedule import Schedule, check

WINDOW = Mask(Band(5, 0))


@pytest.mark.parametrize("n", (1, 2, 3, 6, 8, 16))
def test_the_same_shards_meet(n):
    for name, plain in schedules(n).items():
        for one in (plain, plain.swapped()):
            near = check(nearest_first(one, WINDOW))
            assert (near.q, near.kv, near.num_steps) == (one.q, one.kv, one.num_steps), name


def test_a_ring_goes_half_round_and_then_the_other_way():
    near = nearest_first(ring(6), WINDOW)
    assert [near.holder(step, 0) for step in range(6)] == [0, 5, 4, 3, 1, 2]


def test_only_a_window_changes_the_order_and_only_of_equal_hops():
    assert nearest_first(ring(8), Mask(CAUSAL)) == ring(8)
    assert nearest_first(double_ring(8, 4), WINDOW) == double_ring(8, 4)
    own = ((0,), (1,), (2,))
    swap = Schedule(own, own, ((1, 0, 2),) * 2)
    assert nearest_first(swap, WINDOW) == swap


@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize(("where", "borders"), ((contiguous, 1), (zigzag, 2)))
def test_a_row_crosses_from_host_to_host_once(where, borders, queries_walk):
    """Hosts of 8 ranks, a window of three shards: what leaves a host is what the other one reads,
    not more on the way back."""
    n, rows = 16, 8
    layout, window = where(n, n * rows), 3 * rows
    problem = Problem(ring(n), layout, layout, Mask(Band(window, 0)), queries_walk)
    crossing = sum(
        parcel.num_rows
        for rank in range(n)
        for step in lower(problem, rank).steps
        for parcel in (*step.hop_out, *step.owner_out)
        if parcel.peer // 8 != rank // 8
    )
    assert crossing <= window * borders
