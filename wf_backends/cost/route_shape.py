"""The shape of a route, for any number of ranks: the shards that a rank gathers, and its hops.

A route's ranks are numbers with digits (see schedule/placement.py). All messages of a route go
along one digit, an axis: to the rank with the next value of that digit, or to the ranks with all
other values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from wf_backends.cluster import Topology
from wf_backends.cost.workload import HeadSplit
from wf_backends.schedule import Placed, digits, strides


@dataclass(slots=True)
class LinkBytes:
    """Bytes sent one way: through the busiest NIC, and the busiest rank's link inside its host."""

    nic: float = 0.0
    inside: float = 0.0

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.nic + other.nic, self.inside + other.inside)

    def seconds(self, topology: Topology) -> float:
        """max(latency + bytes / rate) over both kinds of links; 0 where nothing is sent."""
        return max(topology.inside.seconds(self.inside), topology.between.seconds(self.nic))

    def hold_s(self, topology: Topology, messages: int = 1) -> float:
        """Seconds for which sending this, and receiving as much, keeps a rank from computing."""
        rank_bytes = self.inside + self.nic / topology.ranks_per_nic
        return topology.hold_s(2 * rank_bytes, 2 * messages) if rank_bytes else 0.0


NOTHING = LinkBytes()


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that differ in one digit only."""

    size: int
    per_host: int
    """How many of them one host holds."""
    senders_per_nic: int
    """How many ranks send through one NIC if every rank sends to the next one along the axis."""

    def hop(self, num_bytes: float) -> LinkBytes:
        """The bytes if every rank sends `num_bytes` to the next one along the axis."""
        return LinkBytes(self.senders_per_nic * num_bytes, num_bytes if self.per_host > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class HeldShards:
    """The shards of queries, or of keys, that a rank holds in its first step."""

    shards: int = 1
    axis: Axis | None = None
    """The axis along which their owners lie; None: owners may be any ranks."""
    own: int = 1
    """1 if the rank's own shard is among them, else 0."""
    cross_once: bool = False
    """Whether rows cross to a host once and are passed on inside."""

    @property
    def foreign(self) -> int:
        """How many of the shards come from other ranks."""
        return self.shards - self.own

    def exchange(self, topology: Topology, num_bytes: float, skip_last: int = 0) -> LinkBytes:
        """The bytes if every rank sends `num_bytes` to each other rank that shares this side.

        Args:
            skip_last: how many of these ranks to leave out, the last ones: neighbours come first.
        """
        receivers, ranks_per_nic = self.foreign - skip_last, topology.ranks_per_nic
        if self.axis is None:
            sent, on_one_host = receivers * num_bytes, topology.hosts == 1
            return LinkBytes(inside=sent) if on_one_host else LinkBytes(ranks_per_nic * sent)
        per_host = self.axis.per_host
        near = min(receivers, per_host - 1)
        inside, far = min(near, 1) if topology.direct_links else near, receivers - near
        if self.cross_once:
            far /= per_host  # one receiver of each other host gets the rows, and passes them on
            inside += far if topology.direct_links else far * (per_host - 1)
        return LinkBytes(ranks_per_nic * far * num_bytes, inside * num_bytes)


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The shards that a rank of a route gathers, and its hops."""

    queries: HeldShards
    keys: HeldShards
    hops: tuple[tuple[int, Axis], ...]
    """(number of hops, their axis), in order."""
    cross_once: bool = False
    """Whether rows of the side that stays cross to a host once and are passed on inside."""

    @property
    def num_hops(self) -> int:
        return sum(count for count, _ in self.hops)

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers rows of several owners."""
        return bool(self.queries.foreign or self.keys.foreign)

    @property
    def crosses_several_times(self) -> bool:
        """Whether several ranks of a host read a row of another host."""
        axes = (self.queries.axis, self.keys.axis)
        return any(1 < axis.per_host < axis.size for axis in axes if axis is not None)


def shape_of(placed: Placed, split: HeadSplit) -> RouteShape:
    """The shape of a route whose ranks are groups of the cluster's ranks (`split.groups`).

    Raises:
        NotImplementedError: for a route whose shape is not written here.
    """
    size, route = split.route_size, placed.route
    sizes = digits(route, size)
    digit_strides = strides(sizes, placed.order)
    axes = [_axis(split, *digit) for digit in zip(sizes, digit_strides, strict=True)]
    queries, keys = HeldShards(), HeldShards()
    match route["name"]:
        case "ring":
            hops = ((size - 1, axes[0]),)
        case "double_ring":
            outer, inner = axes
            hops = (outer.size * (inner.size - 1), inner), (outer.size - 1, outer)
        case "all_gather":
            keys, hops = HeldShards(size, axes[0]), ()
        case "mesh":
            column, row = axes
            queries, hops = HeldShards(row.size, row), ((column.size - 1, column),)
        case "concentric":
            block, position, member = axes
            queries, keys = HeldShards(member.size, member), HeldShards(block.size, own=0)
            hops = ((position.size - 1, position),)
        case name:
            raise NotImplementedError(f"route {name!r} has no shape: add it to shape_of")
    return RouteShape(queries, keys, hops, placed.host_size > 1)


def _axis(split: HeadSplit, size: int, stride: int) -> Axis:
    """The axis of `size` ranks of the route that are `stride` ranks of the route apart.

    Where hosts do not hold whole digits, figures are those of the busiest host: fewer ranks of the
    axis share a host, and ranks of two values of the digit send to the next host.
    """
    topology, cluster_stride = split.topology, split.groups.rank_distance(stride)
    whole = topology.ranks_per_host % cluster_stride == 0
    fitting = topology.ranks_per_host // cluster_stride if whole else 1
    per_host = gcd(size, fitting)
    senders = cluster_stride if per_host == min(size, fitting) else 2 * cluster_stride
    return Axis(size, per_host, min(topology.ranks_per_nic, senders) if per_host < size else 0)
