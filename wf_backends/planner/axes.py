"""What a route brings together and how it walks, for any number of ranks.

Pure: standard library only. A route's ranks are digits (see schedule/placement.py), and all its
messages go along one digit, an axis: to the next value of it, or to all other values.
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends.lowering import Pools
from wf_backends.schedule import Placed, digits, strides


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that differ in one digit: how many, and how far apart in rank numbers."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Side:
    """The shards of one side that a rank brings together at first."""

    shards: int = 1
    axis: Axis | None = None
    """Whose ranks they come from; None: from anywhere."""
    own: int = 1
    """How many of them are its own."""

    @property
    def foreign(self) -> int:
        return self.shards - self.own


@dataclass(frozen=True, slots=True)
class Shape:
    """What a route brings together and how it walks: `times` hops along each axis, in order."""

    stay: Side
    walk: Side
    hops: tuple[tuple[int, Axis], ...]
    two_way: bool = False

    @property
    def gathers(self) -> bool:
        """Whether rows of either side are brought together."""
        return bool(self.stay.foreign or self.walk.foreign)

    @property
    def num_hops(self) -> int:
        return sum(times for times, _ in self.hops)


def shape_of(placed: Placed, pools: Pools, queries_walk: bool = False) -> Shape:
    """The shape of a route whose ranks are pools of the cluster's.

    Raises:
        NotImplementedError: for a route whose shape nobody has written here.
    """
    size = pools.count
    sizes = digits(placed.route, size)
    apart = strides(sizes, placed.order)
    axes = [Axis(count, pools.apart(far)) for count, far in zip(sizes, apart, strict=True)]
    queries, keys = Side(), Side()
    match placed.route["name"]:
        case "ring":
            hops = ((size - 1, axes[0]),)
        case "double_ring":
            outer, inner = axes
            hops = (outer.size * (inner.size - 1), inner), (outer.size - 1, outer)
        case "all_gather":
            keys, hops = Side(size, axes[0]), ()
        case "mesh":
            column, row = axes
            queries, hops = Side(row.size, row), ((column.size - 1, column),)
        case "concentric":
            team, place, member = axes
            queries, keys = Side(member.size, member), Side(team.size, own=0)
            hops = ((place.size - 1, place),)
        case name:
            raise NotImplementedError(f"route {name!r} has no shape: add it to axes.shape_of")
    sides = (keys, queries) if queries_walk else (queries, keys)
    return Shape(*sides, hops, placed.two_way)
