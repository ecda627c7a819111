"""The positions in ranges, one by one, and drawn ranges."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from wf_backends.schedule.layout import Layout
from wf_backends.schedule.ranges import Range, Ranges


def positions(ranges: Iterable[Range]) -> list[int]:
    """All positions in the ranges, in their order."""
    return [position for start, stop in ranges for position in range(start, stop)]


def owned_positions(layout: Layout) -> list[int]:
    """The positions that all ranks own, sorted; a position of two owners is there twice."""
    return sorted(position for shard in layout for position in positions(shard))


def drawn_ranges(length: int, max_ranges: int) -> st.SearchStrategy[Ranges]:
    """Sorted, disjoint ranges of positions below `length`, with gaps between them."""
    edges = st.sets(st.integers(0, length), max_size=2 * max_ranges).map(sorted)
    return edges.map(lambda e: tuple(zip(e[::2], e[1::2], strict=False)))
