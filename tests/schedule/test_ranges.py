"""Sets of positions as ranges, against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.positions import drawn_ranges, positions
from wf_backends.schedule.ranges import globalize, intersect, join, locate, size, subtract

any_ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(-2, 6)).map(
        lambda start_and_length: (start_and_length[0], sum(start_and_length))
    ),
    max_size=8,
)
"""In any order; some overlap, and some are empty."""
disjoint_ranges = drawn_ranges(30, max_ranges=5)


@given(any_ranges)
def test_join_is_the_sorted_union_without_neighbours(ranges):
    joined = join(ranges)
    assert positions(joined) == sorted(set(positions(ranges)))
    assert all(before[1] < after[0] for before, after in pairwise(joined))
    assert size(joined) == len(positions(joined))


@given(disjoint_ranges, disjoint_ranges)
def test_intersect_and_subtract_are_those_of_sets(a, b):
    assert positions(intersect(a, b)) == sorted(set(positions(a)) & set(positions(b)))
    assert positions(subtract(a, b)) == sorted(set(positions(a)) - set(positions(b)))


@given(disjoint_ranges, disjoint_ranges)
def test_locate_gives_the_buffer_rows_of_positions(held, other):
    rows = intersect(other, held)
    buffer = positions(held)
    assert [buffer[row] for row in positions(locate(rows, held))] == positions(rows)


@given(disjoint_ranges, disjoint_ranges)
def test_globalize_gives_the_positions_of_buffer_rows(held, other):
    local = intersect(other, ((0, size(held)),))
    buffer = positions(held)
    assert positions(globalize(local, held)) == [buffer[row] for row in positions(local)]
