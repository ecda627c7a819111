"""What a pass costs, in closed form: for thousands of ranks, without building a schedule.

Pure: standard library only. A route's ranks are digits (see placement.py), and all its messages
go along one digit: to the next value of it, or to all other values. On hosts that hold whole
digits this counts a full mask's bytes exactly. For other masks it counts those of a full one: on
the busiest link of a step most rows are needed by someone. Only a sliding window on a contiguous
layout ends the walk early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from wf_backends.cost import Cost, Job, Phase, Walk, buffer_bytes, mask_area
from wf_backends.mask import FULL
from wf_backends.placement import Placed, digits, strides
from wf_backends.topology import Topology


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that differ in one digit: how many, and how far apart in rank numbers."""

    size: int
    stride: int


@dataclass(slots=True)
class Load:
    """Bytes through the busiest NIC, and through the busiest rank's connection in its host."""

    nic: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.nic + other.nic, self.inside + other.inside)

    def seconds(self, topology: Topology) -> float:
        inside = topology.inside.seconds(self.inside)
        return max(inside, topology.between.seconds(self.nic))


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

    @property
    def num_hops(self) -> int:
        return sum(times for times, _ in self.hops)


def shape_of(placed: Placed, size: int, degree: int, queries_walk: bool = False) -> Shape:
    """The shape of a route for `size` ranks, each of them `degree` neighbours of the cluster."""
    sizes = digits(placed.route, size)
    apart = strides(sizes, placed.order)
    axes = [Axis(count, degree * stride) for count, stride in zip(sizes, apart, strict=True)]
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
        case _:
            team, place, member = axes
            queries, keys = Side(member.size, member), Side(team.size, own=0)
            hops = ((place.size - 1, place),)
    return Shape(keys, queries, hops) if queries_walk else Shape(queries, keys, hops)


class Links:
    """Closed forms of who crosses which link."""

    def __init__(self, topology: Topology) -> None:
        self.on_host, self.on_nic = topology.ranks_per_host, topology.ranks_per_nic
        self.one_host = topology.hosts == 1

    def near(self, axis: Axis) -> float:
        """How many ranks of an axis one host holds."""
        return max(1.0, min(axis.size, self.on_host / axis.stride))

    def shift(self, axis: Axis, num_bytes: float) -> Load:
        """Every rank sends to the next one along the axis."""
        near = self.near(axis)
        leaving = min(self.on_nic, axis.stride) if near < axis.size else 0
        return Load(leaving * num_bytes, num_bytes if near > 1 else 0)

    def exchange(self, side: Side, each: float) -> Load:
        """Every rank sends `each` bytes to each rank that it shares this side with."""
        count = side.foreign
        if not count or not each:
            return Load()
        if side.axis is not None:
            near = self.near(side.axis)
            return Load(self.on_nic * (side.axis.size - near) * each, (near - 1) * each)
        if self.one_host:
            return Load(0.0, count * each)
        return Load(self.on_nic * count * each, 0.0)


class Estimator:
    """Closed forms for one pass of a job, whatever the route."""

    def __init__(self, job: Job, walk: Walk) -> None:
        self.job, self.walk, self.topology = job, walk, job.topology
        self.rows, self.links = walk.row_bytes(job.shape), Links(job.topology)
        self.shard = job.workload.seqlen / job.route_size
        mask, seqlen = job.workload.mask, job.workload.seqlen
        self.masked = mask.band != FULL
        self.full = not self.masked and mask.cu_seqlens is None
        scores = mask_area(mask, seqlen)
        self.even_s = scores / job.route_size * walk.seconds_per_score(job)
        uneven = self.masked and mask.band.left == inf and job.workload.layout == "contiguous"
        self.busiest_s = self.even_s * (seqlen * seqlen / scores if uneven else 1)

    def shape(self, placed: Placed) -> Shape:
        job = self.job
        return shape_of(placed, job.route_size, job.degree, self.walk.queries_walk)

    def cost(self, placed: Placed) -> Cost:
        """What the pass costs on a route."""
        shape = self.shape(placed)
        phases, nic, inside = list[Phase](), 0.0, 0.0
        live = self._live_hops(placed, shape)
        calls = (2 if self.masked else 1) * self.job.rate.call_s
        step_s = self.busiest_s / (live + 1) + calls
        for label, times, computes, load in self._phases(shape, live):
            transfer = load.seconds(self.topology)
            name = f"{self.walk.name} {label}"
            phases.append(Phase(name, step_s if computes else 0.0, transfer, times))
            nic += times * load.nic
            inside += times * load.inside
        stay, walk = shape.stay.shards * self.shard, shape.walk.shards * self.shard
        memory = buffer_bytes(self.shard, stay, walk, self.rows)
        return Cost(tuple(phases), nic, inside, memory)

    def bound(self, placed: Placed) -> float:
        """Seconds that the pass takes at least: even work, and rows that must be gathered.

        Never more than `cost.pass_cost`, whatever the mask, the layout and the placement.
        """
        if not self.full:
            return self.even_s  # rows that nobody needs are not brought
        workload, rows = self.job.workload, self.rows
        gathered = self.shape(placed).stay.shards - 1
        fewest = workload.seqlen // self.topology.size * self.job.degree * gathered
        both = self.topology.inside.bytes_per_s + self.topology.between.bytes_per_s
        return self.even_s + fewest * (rows.stay + rows.stay_partial) / both

    def _phases(self, shape: Shape, live: int) -> Iterator[tuple[str, int, bool, Load]]:
        """(label, times, whether tiles are computed, what travels)."""
        shard, rows, links = self.shard, self.rows, self.links
        gather = links.exchange(shape.stay, shard * rows.stay)
        yield "gather", 1, False, gather + links.exchange(shape.walk, shard * rows.walk)
        hop, partial = shard * shape.walk.shards * rows.walk, shard * rows.walk_partial
        moved = (0.0, shape.walk.foreign * partial, shape.walk.shards * partial)
        yield from _steps(shape, links, live, hop, moved)
        home = links.exchange(shape.stay, shard * rows.stay_partial)
        yield "home", 1, False, home + _homeward(shape, links, partial)

    def _live_hops(self, placed: Placed, shape: Shape) -> int:
        """How many hops carry anything: in a causal window all readers of a key are near.

        They are on the higher ranks, so this needs a walk in that direction.
        """
        band = self.job.workload.mask.band
        if not (placed.reverse and ends_early(self.job)):
            return shape.num_hops
        return min(shape.num_hops, ceil(band.left / (shape.stay.shards * self.shard)))


def ends_early(job: Job) -> bool:
    """Whether keys that walk towards higher ranks soon meet nobody who needs them."""
    band = job.workload.mask.band
    return job.workload.layout == "contiguous" and band.left < inf and band.right <= 0


def _steps(
    shape: Shape, links: Links, live: int, hop: float, moved: tuple[float, float, float]
) -> Iterator[tuple[str, int, bool, Load]]:
    """The steps: a hop of `hop` bytes behind each but the last, partial results one step later.

    Args:
        live: hops that carry anything; the steps beyond them have nothing to do.
        moved: bytes of partial results that leave in step 0, in step 1, and in each later one.
    """
    done = 0
    for times, axis in shape.hops:
        for first, stop, partial in zip((0, 1, 2), (1, 2, live), moved, strict=True):
            count = min(done + times, stop, live) - max(done, first)
            if count > 0:
                yield "steps", count, True, links.shift(axis, hop + partial)
        done += times
    last = moved[min(live, 2)]
    yield "last step", 1, True, links.shift(shape.hops[0][1], last) if last else Load()


def _homeward(shape: Shape, links: Links, each: float) -> Load:
    """Partial results of walkers, from where they end to where they belong."""
    if not shape.num_hops:
        return links.exchange(shape.walk, each)
    if shape.walk.shards == 1:
        return links.shift(shape.hops[-1][1], each)
    return links.exchange(Side(shape.walk.shards, own=0), each)
