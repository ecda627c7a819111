"""What a route brings together and how it walks, for any number of ranks.

A route's ranks are digits (see schedule/placement.py), and all its messages go along one digit, an
axis: to the next value of it, or to all other values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from wf_backends.cluster import Topology
from wf_backends.cost.workload import HeadSplit
from wf_backends.schedule import Placed, digits, strides


@dataclass(slots=True)
class Load:
    """Bytes one way through the busiest NIC, and through the busiest rank's link in its host."""

    nic: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.nic + other.nic, self.inside + other.inside)

    def seconds(self, topology: Topology) -> float:
        """max(latency + bytes / rate) over both kinds of links; 0 where nothing is sent."""
        return max(topology.inside.seconds(self.inside), topology.between.seconds(self.nic))

    def hold_s(self, topology: Topology, messages: int = 1) -> float:
        """How long as many messages out, and as many in, keep a rank from computing."""
        own = self.inside + self.nic / topology.ranks_per_nic
        return topology.hold_s(2 * own, 2 * messages) if own else 0.0


NOTHING = Load()


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that differ in one digit."""

    size: int
    near: int
    """How many of them one host holds."""
    leaving: int
    """How many ranks send through one NIC if every rank sends to the next one along the axis."""

    def hop(self, num_bytes: float) -> Load:
        """Every rank sends to the next one along the axis."""
        return Load(self.leaving * num_bytes, num_bytes if self.near > 1 else 0.0)


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

    def exchange(self, topology: Topology, each: float, fewer: int = 0, once: bool = False) -> Load:
        """Every rank sends `each` bytes to all ranks that it shares this side with.

        Args:
            fewer: leave out so many, the last ones: neighbours exchange first.
            once: rows cross to a host once and are passed on inside.
        """
        count, per_nic = self.foreign - fewer, topology.ranks_per_nic
        if not count * each:
            return NOTHING
        if self.axis is None:
            sent = count * each
            return Load(inside=sent) if topology.hosts == 1 else Load(nic=per_nic * sent)
        here = self.axis.near
        near = min(count, here - 1)
        inside, far = min(near, 1) if topology.direct_links else near, count - near
        if once:
            far /= here  # of the others on a host one gets them, and passes them on
            inside += far if topology.direct_links else far * (here - 1)
        return Load(per_nic * far * each, inside * each)


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What a route brings together and how it walks: `times` hops along each axis, in order."""

    queries: Side
    keys: Side
    hops: tuple[tuple[int, Axis], ...]
    once: bool = False
    """Whether rows of the side that stays cross to a host once and are passed on inside."""

    @property
    def num_hops(self) -> int:
        return sum(times for times, _ in self.hops)

    @property
    def crosses_several_times(self) -> bool:
        """Whether several ranks of a host read a row of another one."""
        axes = (self.queries.axis, self.keys.axis)
        return any(1 < axis.near < axis.size for axis in axes if axis is not None)


def shape_of(placed: Placed, split: HeadSplit) -> RouteShape:
    """The shape of a route whose ranks are groups of the cluster's.

    Raises:
        NotImplementedError: for a route whose shape nobody has written here.
    """
    size, route = split.route_size, placed.route
    sizes = digits(route, size)
    apart = strides(sizes, placed.order)
    axes = [_axis(split, count, far) for count, far in zip(sizes, apart, strict=True)]
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
    return RouteShape(queries, keys, hops, placed.host_size > 1)


def _axis(split: HeadSplit, size: int, groups: int) -> Axis:
    """Ranks of the route that are so many groups apart.

    Where hosts do not hold whole digits, those of the busiest host: fewer of a digit's ranks are
    near, and those of two digits send to the next host.
    """
    at, apart = split.topology, split.groups.rank_distance(groups)
    here = 1 if at.ranks_per_host % apart else at.ranks_per_host // apart
    near = gcd(size, here)
    leaving = apart if near == min(size, here) else 2 * apart
    return Axis(size, near, min(at.ranks_per_nic, leaving) if near < size else 0)
