"""Whose rows lie near: under a window most shards need not be looked at to find those that meet.

Pure: standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from wf_backends.lowering.tiles import limits
from wf_backends.schedule import Band, Layout, Ranges


class Nearby:
    """The shards of one side whose rows a row of the other side may meet.

    Args:
        home: the rows of every shard. band: of positions, keys beside queries.
        queries: whether these are shards of queries, and not of keys.
    """

    def __init__(self, home: Layout, band: Band, queries: bool) -> None:
        pieces = sorted((*piece, at) for at, shard in enumerate(home) for piece in shard)
        self._starts = [start for start, _, _ in pieces]
        self._stops = [stop for _, stop, _ in pieces]
        self._shards = [shard for _, _, shard in pieces]
        sides = limits(band)
        self._before, self._after = sides[::-1] if queries else sides

    def of(self, rows: Ranges) -> frozenset[int]:
        """The shards with a row that some of these rows, of the other side, may meet."""
        found: set[int] = set()
        for start, stop in rows:
            first = bisect_right(self._stops, start - self._before)
            last = bisect_left(self._starts, stop + self._after)
            found.update(self._shards[first:last])
        return frozenset(found)
