"""Sets of positions as ranges, beside Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wf_backends.schedule.ranges import Ranges, globalize, intersect, join, locate, size, subtract

pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5)
sets = pieces.map(join)


def positions(ranges: Ranges) -> list[int]:
    return [p for start, stop in ranges for p in range(start, stop)]


@given(pieces)
def test_join_is_the_union_sorted_and_with_no_neighbours(given_pieces):
    joined = join(given_pieces)
    assert positions(joined) == sorted({p for a, b in given_pieces for p in range(a, b)})
    assert all(a[1] < b[0] for a, b in zip(joined, joined[1:], strict=False))
    assert size(joined) == len(positions(joined))


@given(sets, sets)
def test_intersect_and_subtract_are_those_of_sets(a, b):
    assert positions(intersect(a, b)) == sorted(set(positions(a)) & set(positions(b)))
    assert positions(subtract(a, b)) == sorted(set(positions(a)) - set(positions(b)))


@given(sets, sets)
def test_locate_gives_the_buffer_rows_of_positions(held, wanted):
    rows = intersect(wanted, held)
    buffer = positions(held)
    assert [buffer[p] for p in positions(locate(rows, held))] == positions(rows)


@given(sets, sets)
def test_globalize_gives_the_positions_of_buffer_rows(held, wanted):
    local = intersect(wanted, ((0, size(held)),))
    assert positions(globalize(local, held)) == [positions(held)[row] for row in positions(local)]
