"""What a pass costs, message by message: bytes over every link and memory, from the plans.

Pure: standard library only. What the phases found here take is told by planner/overlap_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from wf_backends.cluster import KernelRate, Topology
from wf_backends.lowering import (
    BACKWARD_FLOPS,
    Pools,
    Problem,
    RankProgram,
    RowBytes,
    Shape,
    Tile,
    area_in_vain,
    backward_row_bytes,
    forward_row_bytes,
    lower,
    mask_area,
    strands,
    tile_area,
)
from wf_backends.planner.link_loads import Loads
from wf_backends.planner.overlap_model import Chunk, Cost, Phase, Transfer
from wf_backends.planner.rank_phases import Messages, RankPhase, in_step, rank_phases, side_by_side
from wf_backends.planner.simulator import Pace
from wf_backends.schedule import Layout, Mask, Schedule, make_layout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call over the whole sequence."""

    shape: Shape
    seqlen: int
    mask: Mask = Mask()
    layout: str = "zigzag"
    kernel: str = "auto"
    keys: int | None = None
    """Of cross attention, the keys' sequence length; None = that of the queries."""

    @property
    def num_keys(self) -> int:
        return self.seqlen if self.keys is None else self.keys

    @property
    def scores(self) -> int:
        """The (query, key) pairs that the mask lets through."""
        if self.num_keys != self.seqlen:
            return self.seqlen * self.num_keys
        return mask_area(self.mask, self.seqlen)


@dataclass(frozen=True, slots=True)
class Job:
    """A workload on a cluster, heads traded for tokens among `degree` ranks, `stride` apart.

    A rank's heads are computed in `chunks`, one after another.
    """

    workload: Workload
    topology: Topology
    degree: int = 1
    stride: int = 1
    chunks: int = 1

    @property
    def pools(self) -> Pools:
        """The ranks that trade heads for tokens."""
        return Pools(self.topology.size, self.degree, self.stride)

    @property
    def route_size(self) -> int:
        return self.topology.size // self.degree

    @property
    def rate(self) -> KernelRate:
        return self.topology.rate(self.workload.kernel)

    @property
    def shape(self) -> Shape:
        """What one rank computes on at a time, after the exchange."""
        whole, parts = self.workload.shape, self.degree * self.chunks
        return replace(whole, heads=whole.heads // parts, kv_heads=max(1, whole.kv_heads // parts))


@dataclass(frozen=True, slots=True)
class Walk:
    """What a pass moves: the forward or the backward, and which side walks."""

    name: str
    queries_walk: bool = False
    keep: bool = False
    """Whether what the forward gathers is kept, and the backward finds it still there."""

    def row_bytes(self, shape: Shape) -> RowBytes:
        if self.name == "forward":
            return forward_row_bytes(shape, self.queries_walk)
        return backward_row_bytes(shape, self.queries_walk, self.keep)

    def ordered(self, queries: T, keys: T) -> tuple[T, T]:
        """(what stays, what walks)."""
        return (keys, queries) if self.queries_walk else (queries, keys)

    def seconds_per_score(self, job: Job) -> float:
        """Seconds that one (query, key) pair takes, all heads of a rank."""
        shape, rate = job.shape, job.rate
        flops = 4 * shape.batch * shape.heads * shape.head_dim
        if self.name == "forward":
            return flops / rate.forward_flops_per_s
        return BACKWARD_FLOPS * flops / rate.backward_flops_per_s


FORWARD = Walk("forward")
FORWARD_QUERIES = Walk("forward", queries_walk=True)
BACKWARD_KEYS = Walk("backward")
BACKWARD_QUERIES = Walk("backward", queries_walk=True)


Rows = tuple[float, float]  # of the side that stays, and of the one that walks


def pass_cost(job: Job, schedule: Schedule, walk: Walk, two_way: bool = False) -> Cost:
    """What a pass of a schedule costs, message by message, all ranks.

    Args:
        schedule: for job.route_size ranks; rank i of it is pool i of job.pools, whose members all
            do the same with other heads.
    """
    size, rows = job.route_size, walk.row_bytes(job.shape)
    problems = strands(make_problem(job, schedule, walk), two_way)
    plans = [[lower(problem, rank) for problem in problems] for rank in range(size)]
    each = [side_by_side([rank_phases(p, rows, walk.name) for p in own]) for own in plans]
    total, left, pace = Loads(job.topology), Loads(job.topology), Pace(job.topology, job.pools)
    phases: list[Phase] = []
    for ranks in map(in_step, zip(*each, strict=True)):
        took = [[tile_seconds(job, walk, found) for found in rank.tiles] for rank in ranks]
        phases.append(_phase(job, ranks, took, total, left))
        pace.run(ranks, took)
    total.update(left)
    memory = max(sum(buffer_bytes(*_rows(plan), rows) for plan in own) for own in plans)
    gathers = walk.ordered(*schedule.gathers())
    gathered = max(_gathered_bytes(own[0], gathers, rows) for own in plans)
    sent = total.nic_bytes, total.inside_bytes
    return Cost(tuple(phases), *sent, memory, gathered, pace.seconds, pace.busiest_s)


def _phase(
    job: Job,
    ranks: Sequence[RankPhase],
    took: Sequence[Sequence[float]],
    total: Loads,
    left: Loads,
) -> Phase:
    """One phase of all ranks; its bytes are added to the total, or to what has left so far.

    Nobody waits for what leaves before the end, so one rank's may be late and another's early.
    """
    fetched, chunks = Loads(job.topology), list[Chunk]()
    for at in range(len(ranks[0].tiles)):
        fetch = _more(job, fetched, [rank.fetches[at] for rank in ranks])
        leave = _more(job, left, [rank.leaves[at] for rank in ranks])
        chunks.append(Chunk(max(own[at] for own in took), fetch, leave))
    hop = _loads(job, [rank.hop + rank.gives for rank in ranks])
    total.update(hop)
    total.update(fetched)
    return Phase(ranks[0].label, hop.transfer, tuple(chunks))


def _more(job: Job, loads: Loads, sent: Sequence[Messages]) -> Transfer:
    """What the messages of one round add to those of the rounds before it."""
    before = loads.transfer
    loads.update(_loads(job, sent))
    return loads.transfer.beyond(before)


def _loads(job: Job, sent: Sequence[Messages]) -> Loads:
    """What crosses every link, if rank i of the route sends sent[i]."""
    loads, pools = Loads(job.topology), job.pools
    for rank, messages in enumerate(sent):
        for peer, num_bytes in messages:
            for member in range(job.degree):
                loads.add(pools.rank(rank, member), pools.rank(peer, member), num_bytes)
    return loads


def make_problem(job: Job, schedule: Schedule, walk: Walk) -> Problem:
    """The schedule over the job's sequence."""
    workload = job.workload

    def pooled(num_rows: int) -> Layout:
        borders = workload.mask.cu_seqlens or (0, num_rows)
        layout = make_layout(workload.layout, job.topology.size, num_rows, borders)
        return job.pools.merge(layout)

    queries, keys = pooled(workload.seqlen), pooled(workload.num_keys)
    return Problem(schedule, queries, keys, workload.mask, walk.queries_walk, kept=walk.keep)


def tile_seconds(job: Job, walk: Walk, found: Sequence[Tile]) -> float:
    """How long one rank computes on these tiles."""
    diagonal = job.rate.diagonal_keys
    scores = sum(tile_area(tile) + area_in_vain(tile, diagonal) for tile in found)
    return scores * walk.seconds_per_score(job) + len(found) * job.rate.call_s


def buffer_bytes(shards: Rows, held: Rows, rows: RowBytes) -> float:
    """Buffers of a pass at their peak: what stays and its results, and walkers held and arriving.

    In the backward also what stands in for outputs that are not at home (see
    runtime/surrogate_out.py).

    Args:
        shards: rows of a rank's own shards. held: rows of the two buffers. (Stay, walk.)
    """
    stay, walk = held
    beside = shards[1] * rows.walk_partial
    if stay > shards[0]:
        beside += shards[0] * rows.stay_partial + stay * rows.stay_output
    staying, walking = rows.stay + rows.stay_partial, rows.walk + rows.walk_partial
    return stay * staying + walk * (2 * walking + rows.walk_output) + beside


def _rows(plan: RankProgram) -> tuple[Rows, Rows]:
    walk = max(step.num_rows for step in plan.steps)
    return (plan.stay.shard_rows, plan.walk.shard_rows), (plan.stay.num_rows, walk)


def _gathered_bytes(plan: RankProgram, gathers: tuple[bool, bool], rows: RowBytes) -> int:
    """The buffers of the sides (stay, walk) that hold more than the rank's own."""
    stay, walk = plan.stay.num_rows * rows.stay, plan.walk.num_rows * rows.walk
    return gathers[0] * stay + gathers[1] * walk


def agreement_cost(topology: Topology) -> Cost:
    """The ranks' check that all pass the same, once a call."""
    took = Phase("agreement", Transfer(topology.agreement_s))
    return Cost((took,) if topology.agreement_s else (), 0, 0, 0)
