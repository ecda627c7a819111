"""What a pass costs, in closed form: for thousands of ranks, without building a schedule.

Pure: standard library only. A route's ranks are digits (see schedule/placement.py), and all its
messages go along one digit: to the next value of it, or to all other values. On hosts that hold
whole digits this counts a full mask's bytes exactly. For other masks it counts those of a full one:
on the busiest link of a step most rows are needed by someone. Only a sliding window on a contiguous
or a zigzag layout ends the walk early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, inf

from wf_backends.cluster import Topology
from wf_backends.lowering import bundles, unevenness
from wf_backends.planner.axes import Axis, Shape, Side, shape_of
from wf_backends.planner.exact_cost import Job, Walk, buffer_bytes
from wf_backends.planner.overlap_model import NOTHING, Chunk, Cost, Phase, Transfer, transfer
from wf_backends.schedule import FULL, Placed

ROUNDING = 1 - 1e-9  # sums in another order


@dataclass(slots=True)
class Load:
    """Bytes through the busiest NIC, and through the busiest rank's connection in its host."""

    nic: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.nic + other.nic, self.inside + other.inside)

    def transfer(self, topology: Topology) -> Transfer:
        return transfer(topology, self.inside, self.nic)

    def seconds(self, topology: Topology, times: int = 1, scale: float = 1.0) -> float:
        """How long `times` messages take that together are this load `scale` times."""
        near, far = topology.inside, topology.between
        inside = times * near.latency_s + scale * self.inside / near.bytes_per_s
        outside = times * far.latency_s + scale * self.nic / far.bytes_per_s
        return max(inside if self.inside else 0.0, outside if self.nic else 0.0)


@dataclass(frozen=True, slots=True)
class Travel:
    """What travels in one phase, or in `times` phases in a row."""

    label: str
    times: int
    computes: bool
    load: Load
    first: bool = False
    """Whether the rows that stay are gathered in this step."""
    last: bool = False
    """Whether their results go home in this step."""


class Links:
    """Closed forms of who crosses which link."""

    def __init__(self, topology: Topology) -> None:
        self.on_host, self.on_nic = topology.ranks_per_host, topology.ranks_per_nic
        self.one_host, self.direct = topology.hosts == 1, topology.direct_links

    def near(self, axis: Axis) -> float:
        """How many ranks of an axis one host holds."""
        return max(1.0, min(axis.size, self.on_host / axis.stride))

    def shift(self, axis: Axis, num_bytes: float, two_way: bool = False) -> Load:
        """Every rank sends to the next one along the axis, or half of it to the one before."""
        near = self.near(axis)
        leaving = min(self.on_nic, axis.stride) if near < axis.size else 0
        inside = num_bytes / 2 if two_way and self.direct and axis.size > 2 else num_bytes
        return Load(leaving * num_bytes, inside if near > 1 else 0)

    def exchange(self, side: Side, each: float, upto: int | None = None) -> Load:
        """Every rank sends `each` bytes to the ranks that it shares this side with.

        Args:
            upto: in so many rounds; None = to all of them.
        """
        count = side.foreign if upto is None else upto
        if not count or not each:
            return Load()
        if side.axis is not None:
            return self._rounds(side.axis, each, count)
        if self.one_host:
            return Load(0.0, count * each)
        return Load(self.on_nic * count * each, 0.0)

    def _rounds(self, axis: Axis, each: float, count: int) -> Load:
        """Neighbours exchange first, in pairs (see rounds.pairs), so hosts are left last."""
        near = self.near(axis)
        staying = min(count, near - 1)
        inside = min(staying, 1 if self.direct else staying)
        return Load(self.on_nic * (count - staying) * each, inside * each)


class Estimator:
    """Closed forms for one pass of a job, whatever the route."""

    def __init__(self, job: Job, walk: Walk) -> None:
        self.job, self.walk, self.topology = job, walk, job.topology
        self.rows, self.links = walk.row_bytes(job.shape), Links(job.topology)
        mask, seqlen = job.workload.mask, job.workload.seqlen
        sides = walk.ordered(seqlen / job.route_size, job.workload.num_keys / job.route_size)
        self.stay_shard, self.walk_shard = self.shards = sides
        self.masked = mask.band != FULL
        self.full = not self.masked and mask.cu_seqlens is None
        scores = job.workload.scores
        score_s = walk.seconds_per_score(job)
        self.even_s = scores / job.route_size * score_s
        in_vain = mask.band.edges * job.rate.diagonal_keys * seqlen / job.route_size
        self.busiest_s = (
            self.even_s * unevenness(mask, seqlen, job.workload.layout) + in_vain * score_s
        )

    def shape(self, placed: Placed) -> Shape:
        job = self.job
        shape = shape_of(placed, job.pools, self.walk.queries_walk)
        window = job.workload.mask.band.left < inf
        apart = window and job.workload.layout == "zigzag" and not shape.gathers
        return replace(shape, two_way=True) if apart else shape

    def cost(self, placed: Placed) -> Cost:
        """What the pass costs on a route."""
        shape = self.shape(placed)
        live = self._live_hops(shape)
        loads = list(self._loads(shape, live))
        phases = tuple(self._phase(one, shape, live) for one in loads)
        around = self._gathered(shape) + self._returned(shape)
        nic = around.nic + sum(one.times * one.load.nic for one in loads)
        inside = around.inside + sum(one.times * one.load.inside for one in loads)
        stay, walk = shape.stay.shards * self.stay_shard, shape.walk.shards * self.walk_shard
        memory = buffer_bytes(self.shards, (stay, walk), self.rows)
        gathered = stay * self.rows.stay if shape.stay.foreign else 0.0
        gathered += walk * self.rows.walk if shape.walk.foreign else 0.0
        return Cost(phases, nic, inside, memory, gathered)

    def bound(self, placed: Placed) -> float:
        """Seconds that the pass takes at least: even work, and rows that must be gathered.

        Never more than `exact_cost.pass_cost`, whatever the mask, the layout and the placement.
        """
        if not self.full:
            return self.even_s  # rows that nobody needs are not brought
        rows, gathered = self.rows, self.shape(placed).stay.shards - 1
        fewest = int(self.stay_shard / self.job.degree) * self.job.degree * gathered
        both = self.topology.inside.bytes_per_s + self.topology.between.bytes_per_s
        return max(self.even_s, fewest * (rows.stay_gathered + rows.stay_partial) / both)

    def least(self, placed: Placed) -> float:
        """Seconds that `cost` finds at least: all that computes, or all that travels, in a row.

        A message is posted after those before it, and the next phase after it has landed. Partial
        results of walkers are left out of two hops of each axis, and of the last step.
        """
        shape, topology = self.shape(placed), self.topology
        left = live = self._live_hops(shape)
        each = self.walk_shard * shape.walk.shards
        hop, partial = each * self.rows.walk, each * self.rows.walk_partial
        travel, both = 0.0, (self.rows.stay_gathered, self.rows.stay_partial)
        if shape.stay.foreign:
            brought = self.links.exchange(shape.stay, self.stay_shard)
            for row in both:
                travel += transfer(topology, row * brought.inside, row * brought.nic).busy_s
        for times, axis in shape.hops:
            count = min(times, left)
            left -= count
            load = self.links.shift(axis, 1.0, shape.two_way)
            travel += load.seconds(topology, count, count * hop + max(0, count - 2) * partial)
        compute = self.busiest_s + (live + 1) * self._call_s(shape)
        around = 0.0
        if shape.walk.foreign:
            gather = self.links.exchange(shape.walk, self.walk_shard * self.rows.walk_gathered)
            around += gather.seconds(topology)
        if self.rows.walk_partial:
            home = _homeward(shape, self.links, self.walk_shard * self.rows.walk_partial)
            around += home.seconds(topology)
        return (max(compute, travel) + around) * ROUNDING

    def _call_s(self, shape: Shape) -> float:
        """Of a step's kernel calls, beside their FLOPs.

        Under a band two, the last of which sees all keys or none where it is causal; but pools of
        ranks that are apart have two for every member.
        """
        job = self.job
        pieces = 2 * (job.degree if job.stride > 1 else 1) - (job.workload.mask.band.left == inf)
        return (pieces if self.masked else 1) * (1 + shape.two_way) * job.rate.call_s

    def _gathered(self, shape: Shape, upto: int | None = None) -> Load:
        return self.links.exchange(shape.stay, self.stay_shard * self.rows.stay_gathered, upto)

    def _returned(self, shape: Shape, upto: int | None = None) -> Load:
        return self.links.exchange(shape.stay, self.stay_shard * self.rows.stay_partial, upto)

    def _phase(self, one: Travel, shape: Shape, live: int) -> Phase:
        """The phase of what travels, with the tiles that are computed meanwhile."""
        hop = one.load.transfer(self.topology)
        chunks = tuple(self._chunks(one, shape, live)) if one.computes else ()
        return Phase(f"{self.walk.name} {one.label}", hop, chunks, one.times)

    def _chunks(self, one: Travel, shape: Shape, live: int) -> list[Chunk]:
        """A step's tiles: all at once, or a few owners at a time where rows come or go."""
        stay = shape.stay
        calls = self._call_s(shape)
        step_s = self.busiest_s / (live + 1)
        owners = bundles(stay.foreign) if one.first or one.last else []
        none = [NOTHING] * len(owners)
        fetches = self._shares(self._gathered, shape, owners) if one.first else none
        leaves = self._shares(self._returned, shape, owners) if one.last else none
        chunks = [
            Chunk(step_s * size / stay.shards + calls, fetch, leave)
            for size, fetch, leave in zip(owners, fetches, leaves, strict=True)
        ]
        if own := stay.shards - sum(owners):
            alone = Chunk(step_s * own / stay.shards + calls)
            return [alone, *chunks] if one.first else [*chunks, alone]
        return chunks

    def _shares(
        self, upto: Callable[[Shape, int | None], Load], shape: Shape, owners: list[int]
    ) -> list[Transfer]:
        """What every few owners add to those before them."""
        sums = [upto(shape, done).transfer(self.topology) for done in accumulate(owners)]
        return [after.beyond(before) for before, after in pairwise((NOTHING, *sums))]

    def _loads(self, shape: Shape, live: int) -> Iterator[Travel]:
        """The hops of a pass, with the walkers' gathering and their way home."""
        shard, rows, links = self.walk_shard, self.rows, self.links
        yield Travel("gather", 1, False, links.exchange(shape.walk, shard * rows.walk_gathered))
        hop, partial = shard * shape.walk.shards * rows.walk, shard * rows.walk_partial
        moved = (0.0, shape.walk.foreign * partial, shape.walk.shards * partial)
        yield from _steps(shape, links, live, hop, moved)
        yield Travel("home", 1, False, _homeward(shape, links, partial))

    def _live_hops(self, shape: Shape) -> int:
        """How many hops carry anything: in a causal window all readers of a key are near."""
        reach = self._reach(shape)
        if reach is None:
            return shape.num_hops
        return min(shape.num_hops, ceil(self.job.workload.mask.band.left / reach))

    def _reach(self, shape: Shape) -> float | None:
        """How many tokens further a walker's readers are with each hop; None = everywhere.

        Zigzag shards walk both ways, where nothing is gathered: see lowering/direction.py.
        """
        band, layout = self.job.workload.mask.band, self.job.workload.layout
        if band.left == inf or band.right > 0 or len(shape.hops) != 1:
            return None
        if layout == "zigzag":
            return None if shape.gathers else self.stay_shard / 2
        return shape.stay.shards * self.stay_shard if layout == "contiguous" else None


def _steps(
    shape: Shape, links: Links, live: int, hop: float, moved: tuple[float, float, float]
) -> Iterator[Travel]:
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
                load = links.shift(axis, hop + partial, shape.two_way)
                yield Travel("steps", count, True, load, first=not first and not done)
        done += times
    last = moved[min(live, 2)]
    load = links.shift(shape.hops[0][1], last, shape.two_way) if last else Load()
    yield Travel("last step", 1, True, load, first=not live, last=True)


def _homeward(shape: Shape, links: Links, each: float) -> Load:
    """Partial results of walkers, from where they end to where they belong."""
    if not shape.num_hops:
        return links.exchange(shape.walk, each)
    if shape.walk.shards == 1:
        return links.shift(shape.hops[-1][1], each, shape.two_way)
    return links.exchange(Side(shape.walk.shards, own=0), each)
