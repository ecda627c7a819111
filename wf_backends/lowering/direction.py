"""Which way shards walk, and whether their two halves go ways of their own.

Pure: standard library only. Rows that nobody further down needs stop, so under a mask the way
that a route turns decides how far they go.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from wf_backends.lowering.lower import Problem, rows_walked
from wf_backends.schedule import FULL, Mask, mirrored

Way = tuple[Problem, ...]  # problems that together are one


def strands(problem: Problem, two_way: bool = False) -> Way:
    """The problem as its shards walk: as one, or as two that go opposite ways.

    Under a sliding window that is what lets fewer rows walk: one way or the other; or both, where
    each pair of shards meets on the way on which they are nearer. A zigzag's first chunks are read
    by later ranks, its last chunks by earlier ones. A route that gathers walks as one, since rows
    would be gathered for either.

    Args:
        two_way: always as two. Without a window, the first and the last half of every shard.
    """
    turned = replace(problem, schedule=mirrored(problem.schedule))
    if problem.mask.band.left < inf:
        both = replace(problem, share=0), replace(turned, share=1)
        alone = any(problem.schedule.gathers())
        whole = () if two_way else ((problem,), (turned,))
        return _fewest(*whole, *(() if alone else (both,)))
    if not two_way:
        return (problem,)
    opposite = (replace(problem, half=0), replace(turned, half=1))
    return _fewest(opposite, (replace(turned, half=0), replace(problem, half=1)))


def _fewest(*ways: Way) -> Way:
    """The first of the ways on which the fewest rows walk.

    Documents are left out of the count: they change with every batch, and the way need not.
    """
    if ways[0][0].mask.band == FULL:
        return ways[0]

    def walked(way: Way) -> int:
        return sum(rows_walked(replace(one, mask=Mask(one.mask.band))) for one in way)

    return min(ways, key=walked)
