"""The directions in which walkers hop: under a window, first to the near ranks of either side."""

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
def test_nearest_first_keeps_all_meetings(n):
    for name, keys_walk in schedules(n).items():
        for schedule in (keys_walk, keys_walk.swapped()):
            reordered = check(nearest_first(schedule, WINDOW))
            assert (reordered.q, reordered.kv) == (schedule.q, schedule.kv), name
            assert reordered.num_steps == schedule.num_steps, name


def test_a_ring_under_a_window_goes_half_round_and_then_the_other_way():
    reordered = nearest_first(ring(6), WINDOW)
    assert [reordered.holder(step, 0) for step in range(6)] == [0, 5, 4, 3, 1, 2]


def test_nearest_first_changes_nothing_without_a_window():
    assert nearest_first(ring(8), Mask(CAUSAL)) == ring(8)


def test_nearest_first_changes_nothing_where_hops_differ():
    assert nearest_first(double_ring(8, 4), WINDOW) == double_ring(8, 4)


def test_nearest_first_changes_nothing_where_walkers_do_not_return_to_their_origin():
    own_shards, swap = ((0,), (1,), (2,)), (1, 0, 2)
    schedule = Schedule(own_shards, own_shards, (swap, swap))
    assert nearest_first(schedule, WINDOW) == schedule


@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize(("make_layout", "borders"), ((contiguous, 1), (zigzag, 2)))
def test_under_a_window_a_row_crosses_between_hosts_once(make_layout, borders, queries_walk):
    """Two hosts of 8 ranks, whose shards meet at `borders` places: a window of rows at each."""
    n, rows = 16, 8
    layout, window = make_layout(n, n * rows), 3 * rows
    problem = Problem(ring(n), layout, layout, Mask(Band(window, 0)), queries_walk)
    rows_across = sum(
        parcel.num_rows
        for rank in range(n)
        for step in lower(problem, rank).steps
        for parcel in (*step.hop_out, *step.owner_out)
        if parcel.peer // 8 != rank // 8
    )
    assert rows_across <= window * borders
