"""What a pass costs: predicted seconds, bytes over every link, memory; derived from the plans.

Pure: standard library only. A pass is a row of phases. In each, some messages travel while some
tiles are computed, and it lasts as long as the longer of the two. Gathering and going home hide
behind nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from wf_backends.layout import make_layout, merge_shards
from wf_backends.mask import Mask
from wf_backends.schedule import Schedule
from wf_backends.tiles import Tile
from wf_backends.topology import KernelRate, Topology
from wf_backends.traffic import RowBytes, Shape, backward_row_bytes, forward_row_bytes
from wf_backends.walk import Parcel, Problem, RankPlan, Step, plan_rank

BACKWARD_FLOPS = 2.5  # five matrix products for the forward's two (FlashAttention-2)


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call over the whole sequence."""

    shape: Shape
    seqlen: int
    mask: Mask = Mask()
    layout: str = "zigzag"
    kernel: str = "auto"


@dataclass(frozen=True, slots=True)
class Job:
    """A workload on a cluster, heads traded for tokens among `degree` consecutive ranks."""

    workload: Workload
    topology: Topology
    degree: int = 1

    @property
    def route_size(self) -> int:
        return self.topology.size // self.degree

    @property
    def rate(self) -> KernelRate:
        return self.topology.rate(self.workload.kernel)

    @property
    def shape(self) -> Shape:
        """What one rank computes on, after the exchange."""
        whole = self.workload.shape
        return replace(
            whole,
            heads=whole.heads // self.degree,
            kv_heads=max(1, whole.kv_heads // self.degree),
        )


@dataclass(frozen=True, slots=True)
class Walk:
    """What a pass moves: the forward, or the backward with one side walking."""

    name: str
    queries_walk: bool = False

    def row_bytes(self, shape: Shape) -> RowBytes:
        if self.name == "forward":
            return forward_row_bytes(shape)
        return backward_row_bytes(shape, self.queries_walk)

    def seconds_per_score(self, job: Job) -> float:
        """Seconds that one (query, key) pair takes, all heads of a rank."""
        shape, rate = job.shape, job.rate
        flops = 4 * shape.batch * shape.heads * shape.head_dim
        if self.name == "forward":
            return flops / rate.forward_flops_per_s
        return BACKWARD_FLOPS * flops / rate.backward_flops_per_s


FORWARD = Walk("forward")
BACKWARD_KEYS = Walk("backward")
BACKWARD_QUERIES = Walk("backward", queries_walk=True)


@dataclass(frozen=True, slots=True)
class Phase:
    """Messages that travel while tiles are computed; figures of the busiest rank and link."""

    label: str
    compute_s: float
    transfer_s: float
    times: int = 1
    """How many phases in a row are like this one."""

    @property
    def seconds(self) -> float:
        return self.times * max(self.compute_s, self.transfer_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one or several passes cost."""

    phases: tuple[Phase, ...]
    nic_bytes: float
    """Through the busiest NIC, one way."""
    inside_bytes: float
    """Through the busiest rank's connection inside its host, one way."""
    memory_bytes: float
    """Of buffers beyond what the caller holds, at their peak, on the rank with the most."""

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def compute_s(self) -> float:
        return sum(phase.times * phase.compute_s for phase in self.phases)

    @property
    def exposed_s(self) -> float:
        """Transfers that nothing hides."""
        return self.seconds - self.compute_s

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(
            self.phases + other.phases,
            self.nic_bytes + other.nic_bytes,
            self.inside_bytes + other.inside_bytes,
            max(self.memory_bytes, other.memory_bytes),
        )


class Loads:
    """Bytes that cross every link, both ways; several phases may be added up."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.inside: Counter[tuple[str, int]] = Counter()
        self.nics: Counter[tuple[str, int]] = Counter()

    def add(self, source: int, target: int, num_bytes: int) -> None:
        """A message from rank `source` to rank `target`."""
        at = self.topology
        if at.host(source) == at.host(target):
            self.inside["out", source] += num_bytes
            self.inside["in", target] += num_bytes
        else:
            self.nics["out", at.nic(source)] += num_bytes
            self.nics["in", at.nic(target)] += num_bytes

    def update(self, other: Loads) -> None:
        self.inside.update(other.inside)
        self.nics.update(other.nics)

    @property
    def nic_bytes(self) -> int:
        return max(self.nics.values(), default=0)

    @property
    def inside_bytes(self) -> int:
        return max(self.inside.values(), default=0)

    @property
    def seconds(self) -> float:
        """Until the busiest link is done."""
        inside = self.topology.inside.seconds(self.inside_bytes)
        return max(inside, self.topology.between.seconds(self.nic_bytes))


def rank_phases(
    plan: RankPlan, rows: RowBytes, name: str
) -> Iterator[tuple[str, tuple[Tile, ...], list[tuple[int, int]]]]:
    """(label, tiles, [(peer, bytes)]) of everything that one rank does in a pass, in order.

    The labels and bytes are those of `traffic.bytes_sent`, and of the executor.
    """

    def messages(parcels: Iterable[Parcel | None], row: int) -> list[tuple[int, int]]:
        sent = ((parcel.peer, parcel.num_rows * row) for parcel in parcels if parcel)
        return [(peer, num_bytes) for peer, num_bytes in sent if peer != plan.rank and num_bytes]

    def partials(step: Step | None) -> list[tuple[int, int]]:
        if step is None:
            return []
        return messages((step.partial_out, *step.home_out), rows.walk_partial)

    gather = messages(plan.stay.give, rows.stay) + messages(plan.walk.give, rows.walk)
    yield f"{name} gather", (), gather
    before: Step | None = None
    for index, step in enumerate(plan.steps):
        sent = messages((step.pass_out,), rows.walk) + partials(before)
        yield f"{name} step {index}", step.tiles, sent
        before = step
    home = messages(plan.stay.take, rows.stay_partial) + partials(before)
    yield f"{name} home", (), home


def pass_cost(job: Job, schedule: Schedule, walk: Walk) -> Cost:
    """What a pass of a schedule costs, message by message, all ranks.

    Args:
        schedule: for job.route_size ranks; rank i of it is the `degree` consecutive ranks of the
            cluster from i * degree, which all do the same with other heads.
    """
    size, rows = job.route_size, walk.row_bytes(job.shape)
    problem = make_problem(job, schedule, walk)
    plans = [plan_rank(problem, rank) for rank in range(size)]
    each = [list(rank_phases(plan, rows, walk.name)) for plan in plans]
    total, phases = Loads(job.topology), list[Phase]()
    for at, (label, _, _) in enumerate(each[0]):
        loads = Loads(job.topology)
        for rank in range(size):
            for peer, num_bytes in each[rank][at][2]:
                for member in range(job.degree):
                    loads.add(rank * job.degree + member, peer * job.degree + member, num_bytes)
        busiest = max(tile_seconds(job, walk, each[rank][at][1]) for rank in range(size))
        phases.append(Phase(label, busiest, loads.seconds))
        total.update(loads)
    memory = max(buffer_bytes(*_rows(plan), rows) for plan in plans)
    return Cost(tuple(phases), total.nic_bytes, total.inside_bytes, memory)


def make_problem(job: Job, schedule: Schedule, walk: Walk) -> Problem:
    """The schedule over the job's sequence."""
    workload = job.workload
    borders = workload.mask.cu_seqlens or (0, workload.seqlen)
    layout = make_layout(workload.layout, job.topology.size, workload.seqlen, borders)
    pooled = merge_shards(layout, job.degree)
    return Problem(schedule, pooled, pooled, workload.mask, walk.queries_walk)


def tile_seconds(job: Job, walk: Walk, found: Sequence[Tile]) -> float:
    """How long one rank computes on these tiles."""
    scores = sum(map(tile_area, found))
    return scores * walk.seconds_per_score(job) + len(found) * job.rate.call_s


def tile_area(tile: Tile) -> int:
    """How many (row, key) pairs the tile's band lets through."""
    num_rows, num_keys = tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0]
    return band_area(num_rows, num_keys, tile.band.left, tile.band.right)


def band_area(num_rows: int, num_keys: int, left: float, right: float) -> int:
    """The pairs with -left <= key - row <= right, without a loop over rows."""
    upto = _keys_before(num_rows, num_keys, right + 1)
    return upto - _keys_before(num_rows, num_keys, -left)


def _keys_before(num_rows: int, num_keys: int, offset: float) -> int:
    """The sum over rows of the keys before row + offset: 0, then rising by one, then all."""
    first = int(min(max(-offset, 0), num_rows))  # rows below see none
    full = int(min(max(num_keys - offset, first), num_rows))  # rows from here on see all
    if full == first:
        return (num_rows - full) * num_keys
    low, high = first + int(offset), full - 1 + int(offset)
    return (low + high) * (full - first) // 2 + (num_rows - full) * num_keys


def mask_area(mask: Mask, seqlen: int) -> int:
    """The (query, key) pairs that a mask lets through."""
    band = mask.band
    sizes = (stop - start for start, stop in mask.documents(seqlen))
    return sum(band_area(size, size, band.left, band.right) for size in sizes)


def buffer_bytes(shard: float, stay: float, walk: float, rows: RowBytes) -> float:
    """Buffers of a pass at their peak: what stays and its results, and walkers held and arriving.

    Args:
        shard: rows of a rank's own shard. stay, walk: rows of the two buffers.
    """
    home = (rows.stay_partial if stay > shard else 0) + rows.walk_partial
    held = stay * (rows.stay + rows.stay_partial) + 2 * walk * (rows.walk + rows.walk_partial)
    return held + shard * home


def _rows(plan: RankPlan) -> tuple[int, int, int]:
    walk = max(step.num_rows for step in plan.steps)
    return plan.stay.shard_rows, plan.stay.num_rows, walk


def ulysses_cost(job: Job) -> Cost:
    """Heads for tokens and back, around one pass; the backward's gradients weigh the same."""
    shape, degree, topology = job.workload.shape, job.degree, job.topology
    if degree == 1:
        return Cost((), 0, 0, 0)
    row = shape.batch * shape.head_dim * shape.itemsize
    shard = -(-job.workload.seqlen // topology.size)
    heads = {"q": job.shape.heads, "k": job.shape.kv_heads, "v": job.shape.kv_heads}
    heads["out"] = job.shape.heads
    near = gcd(degree, topology.ranks_per_host)  # members on one host, at least
    total, phases = Loads(topology), list[Phase]()
    for name, count in heads.items():
        each, loads = shard * row * count, Loads(topology)
        loads.inside["out", 0] = (near - 1) * each
        loads.nics["out", 0] = (degree - near) * each * topology.ranks_per_nic
        phases.append(Phase(f"ulysses {name}", 0.0, loads.seconds))
        total.update(loads)
    held = shard * row * degree * sum(heads.values())
    return Cost(tuple(phases), total.nic_bytes, total.inside_bytes, held)
