"""What a route brings together and how it walks, for any number of ranks.

Pure: standard library only. A route's ranks are digits (see schedule/placement.py), and all its
messages go along one digit, an axis: to the next value of it, or to all other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from wf_backends.cluster import Topology
from wf_backends.lowering import UlyssesGroups
from wf_backends.planner.link_loads import Load
from wf_backends.planner.workload import HeadSplit
from wf_backends.schedule import Placed, digits, strides


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that differ in one digit: how many, and how far apart in rank numbers."""

    size: int
    stride: int

    def on_host(self, topology: Topology) -> float:
        """How many of them one host holds."""
        return max(1.0, min(self.size, topology.ranks_per_host / self.stride))

    def hop(self, topology: Topology, num_bytes: float) -> Load:
        """Every rank sends to the next one along the axis."""
        near = self.on_host(topology)
        leaving = min(topology.ranks_per_nic, self.stride) if near < self.size else 0
        return Load(leaving * num_bytes, num_bytes if near > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Side:
    """The shards of one side that a rank brings together at first."""

    shards: int = 1
    axis: Axis | None = None
    """Whose ranks they come from; None: from anywhere."""
    own: int = 1
    """How many of them are its own."""
    once: bool = False
    """Whether they cross to a host once and are passed on inside."""

    @property
    def foreign(self) -> int:
        return self.shards - self.own

    def exchange(self, topology: Topology, each: float, fewer: int = 0) -> Load:
        """Every rank sends `each` bytes to all ranks that it shares this side with.

        Args:
            fewer: leave out so many, the last ones: neighbours exchange first.
        """
        count, per_nic = self.foreign - fewer, topology.ranks_per_nic
        if self.axis is None:
            one_host = topology.hosts == 1
            return Load(0.0, count * each) if one_host else Load(per_nic * count * each, 0.0)
        near = min(count, self.axis.on_host(topology) - 1)
        inside = min(near, 1) if topology.direct_links else near
        if self.once:
            here = self.axis.on_host(topology)
            far = (count - near) / here  # of the others on a host one gets them, and passes them on
            passed = far if topology.direct_links else far * (here - 1)
            return Load(per_nic * far * each, (inside + passed) * each)
        return Load(per_nic * (count - near) * each, inside * each)


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What a route brings together and how it walks: `times` hops along each axis, in order."""

    stay: Side
    walk: Side
    hops: tuple[tuple[int, Axis], ...]

    @property
    def gathers(self) -> bool:
        """Whether rows of either side are brought together."""
        return bool(self.stay.foreign or self.walk.foreign)

    @property
    def num_hops(self) -> int:
        return sum(times for times, _ in self.hops)


def crossing_once(found: Iterable[Placed], split: HeadSplit) -> Iterator[Placed]:
    """Of these routes those on which rows would cross to a host several times, to cross once."""
    at = split.topology
    for placed in found:
        shape = shape_of(placed, split.groups)
        sides = (side for side in (shape.stay, shape.walk) if side.axis and side.foreign > 0)
        if any(1 < side.axis.on_host(at) < side.axis.size for side in sides if side.axis):
            yield replace(placed, host_size=at.ranks_per_host)


def shape_of(placed: Placed, groups: UlyssesGroups, queries_walk: bool = False) -> RouteShape:
    """The shape of a route whose ranks are groups of the cluster's.

    Raises:
        NotImplementedError: for a route whose shape nobody has written here.
    """
    size, route = groups.count, placed.route
    sizes = digits(route, size)
    apart = strides(sizes, placed.order)
    axes = [Axis(count, groups.apart(far)) for count, far in zip(sizes, apart, strict=True)]
    queries, keys = Side(), Side()
    match route["name"]:
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
            raise NotImplementedError(f"route {name!r} has no shape: add it to shape_of")
    stay, walk = (keys, queries) if queries_walk else (queries, keys)
    return RouteShape(replace(stay, once=placed.host_size > 1), walk, hops)
