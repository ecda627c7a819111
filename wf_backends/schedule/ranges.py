"""Sets of token positions as sorted, disjoint (start, stop) ranges with gaps between them.

Buffers hold their rows in sequence order. So the set of positions that a buffer holds says where
each row lies: `locate` and `globalize` translate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from math import inf

Range = tuple[int, int]  # start, stop
Ranges = tuple[Range, ...]


def join(ranges: Iterable[Range]) -> Ranges:
    """The union of any ranges: sorted, disjoint, neighbours joined, empty ranges dropped."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(a: Ranges, b: Ranges) -> Ranges:
    """The positions that are in either set."""
    if not b or a == b:
        return a
    return join((*a, *b)) if a else b


def range_length(piece: Range) -> int:
    """How many positions a range holds."""
    return piece[1] - piece[0]


def size(ranges: Iterable[Range]) -> int:
    """How many positions the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """The positions that are in both sets."""
    if a == b:
        return a
    common: list[Range] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """The positions of `a` that are not in `b`."""
    if not a or not b:
        return a
    if a == b:
        return ()
    edges = [a[0][0], *(edge for pair in b for edge in pair), a[-1][1]]
    gaps = join((lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True))
    return intersect(a, gaps)


def locate_each(rows: Ranges, held: Ranges) -> list[Range]:
    """For each range of `rows` (positions), its slice of a buffer that holds `held`.

    Every range of `rows` must lie inside one range of `held`.
    """
    offsets = _offsets(held)
    local: list[Range] = []
    for start, stop in rows:
        index = bisect_right(held, (start, inf)) - 1
        assert index >= 0 and stop <= held[index][1], f"rows {rows} are not all in {held}"
        shift = offsets[index] - held[index][0]
        local.append((start + shift, stop + shift))
    return local


def locate(rows: Ranges, held: Ranges) -> Ranges:
    """As `locate_each`, neighbours joined: the fewest slices, in order."""
    return join(locate_each(rows, held))


def globalize(local: Ranges, held: Ranges) -> Ranges:
    """The positions in `local` slices of a buffer that holds `held`."""
    positions: list[Range] = []
    for offset, held_range in zip(_offsets(held), held, strict=False):
        shift = held_range[0] - offset
        slices = intersect(local, ((offset, offset + range_length(held_range)),))
        positions += [(start + shift, stop + shift) for start, stop in slices]
    return join(positions)


@lru_cache(maxsize=64)  # needed for every tile
def _offsets(held: Ranges) -> tuple[int, ...]:
    """The row at which each range begins in a buffer of `held`, and the buffer's length."""
    return tuple(accumulate(map(range_length, held), initial=0))
