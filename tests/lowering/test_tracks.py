"""Where walkers are: without tables the same as with them."""

from __future__ import annotations

import pytest

from tests.cases import schedules
from wf_backends.lowering.tracks import Cycles, Tables, carriers, tracks
from wf_backends.schedule.schedule import Schedule, mirrored, ring


@pytest.mark.parametrize("n", (1, 2, 6, 8, 16))
def test_cycles_are_where_tables_say(n: int) -> None:
    for name, plain in schedules(n).items():
        for one in (plain, plain.turned(), mirrored(plain)):
            found = tracks(one)
            assert isinstance(found, Tables if one.has_laps else Cycles), name
            for step, places in enumerate(one.places()):
                assert [found.step(origin, rank) for origin, rank in enumerate(places)] == [
                    step
                ] * n
            if one.has_laps:
                continue
            cycles, tables = Cycles(one), Tables(one)
            for step in range(one.num_steps):
                for rank in range(n):
                    assert cycles.place(step, rank) == tables.place(step, rank), name
                    assert cycles.origin(step, rank) == tables.origin(step, rank), name


def test_hops_that_are_equal_are_no_laps() -> None:
    once = ring(3)
    again = Schedule(once.q, once.kv, tuple(tuple(list(hop)) for hop in once.hops))
    assert again.hops[0] is not again.hops[1]
    assert not again.has_laps


def test_who_names_a_shard() -> None:
    assert carriers(((0, 1), (1, 2), (2,))) == [[0], [0, 1], [1, 2]]
    assert carriers(((0, 1), (0, 1))) == [[0, 1], [0, 1]]
    assert carriers(((), (1,))) == [[], [1]]
