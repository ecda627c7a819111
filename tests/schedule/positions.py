"""The positions in ranges, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from wf_backends.schedule.layout import Layout
from wf_backends.schedule.ranges import Range


def positions(ranges: Iterable[Range]) -> list[int]:
    """All positions in the ranges, in their order."""
    return [position for start, stop in ranges for position in range(start, stop)]


def owned_positions(layout: Layout) -> list[int]:
    """The positions that all ranks own, sorted; a position of two owners is there twice."""
    return sorted(position for shard in layout for position in positions(shard))
