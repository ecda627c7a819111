"""Sets of token positions as sorted, disjoint, joined (start, stop) ranges.

Pure: standard library only. A buffer that holds some rows always holds them in sequence
order, so a set of positions and a set of buffer rows translate into each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

Range = tuple[int, int]  # start, stop
Ranges = tuple[Range, ...]


def join(ranges: Iterable[Range]) -> Ranges:
    """The union of any ranges: sorted, disjoint, neighbours joined, empty ones dropped."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def union(a: Ranges, b: Ranges) -> Ranges:
    """The positions that are in either set."""
    if not b or a == b:
        return a
    return join((*a, *b)) if a else b


def span(piece: Range) -> int:
    """How many positions a range holds."""
    return piece[1] - piece[0]


def size(ranges: Iterable[Range]) -> int:
    """How many positions the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """The positions that are in both sets."""
    if a == b:
        return a
    found: list[Range] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """The positions of `a` that are not in `b`."""
    if not a or not b or a == b:
        return () if b else a
    edges = [a[0][0], *(edge for pair in b for edge in pair), a[-1][1]]
    gaps = join((lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True))
    return intersect(a, gaps)


def locate_each(rows: Ranges, held: Ranges) -> list[Range]:
    """Where each of the ranges `rows` lies in a buffer that holds `held`: a local slice each.

    `rows` must be a subset of `held`.
    """
    starts, offsets = [start for start, _ in held], _offsets(held)
    local: list[Range] = []
    for start, stop in rows:
        at = bisect_right(starts, start) - 1
        assert at >= 0 and stop <= held[at][1], f"rows {rows} are not all in {held}"
        by = offsets[at] - held[at][0]
        local.append((start + by, stop + by))
    return local


def locate(rows: Ranges, held: Ranges) -> Ranges:
    """As `locate_each`, neighbours joined: the fewest local slices, in order."""
    return join(locate_each(rows, held))


def globalize(local: Ranges, held: Ranges) -> Ranges:
    """The positions of the local slices of a buffer that holds `held`."""
    shifted = tuple((o, o + span(h)) for o, h in zip(_offsets(held), held, strict=False))
    return join(
        (piece[0] - at[0] + have[0], piece[1] - at[0] + have[0])
        for at, have in zip(shifted, held, strict=True)
        for piece in intersect(local, (at,))
    )


def _offsets(held: Ranges) -> list[int]:
    """Where each range begins in a buffer that holds them, and where the last one ends."""
    return list(accumulate(map(span, held), initial=0))
