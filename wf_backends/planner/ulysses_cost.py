"""What trading heads for tokens costs, and what of it the passes hide.

Pure: standard library only. In chunks (runtime/ulysses_pipeline.py) one is on its way while another
is computed: the first one's way in and the last one's way out hide behind nothing, the others
behind the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from wf_backends.cluster import Topology
from wf_backends.planner.exact_cost import Job
from wf_backends.planner.overlap_model import Cost, Phase, Transfer, seconds, transfer


@dataclass(frozen=True, slots=True)
class TradeCost:
    """One exchange of one chunk: bytes through the busiest NIC, and inside the busiest host."""

    topology: Topology
    nic_bytes: float
    inside_bytes: float
    """Through one rank's connection inside its host."""
    peers: int
    """To how many each rank sends."""

    @property
    def transfer(self) -> Transfer:
        sent = transfer(self.topology, self.inside_bytes, self.nic_bytes)
        return Transfer(sent.busy_s, max(sent.latency_s, self.topology.exchange_s))

    @property
    def hold_s(self) -> float:
        """How long it keeps a rank from computing."""
        at, each = self.topology, self.inside_bytes + self.nic_bytes / self.topology.ranks_per_nic
        held = at.hold_s(2 * each, messages=2 * self.peers)
        return max(held, at.occupied * at.exchange_s)


def trade_costs(job: Job) -> tuple[TradeCost, TradeCost]:
    """Of one chunk: q, k and v in one exchange, out in another.

    The backward's gradients weigh the same, the other way round.
    """
    topology, shape = job.topology, job.shape
    row = shape.batch * shape.head_dim * shape.itemsize
    rows, keys = (-(-n // topology.size) for n in (job.workload.seqlen, job.workload.num_keys))
    own = rows * shape.heads
    counts = own + 2 * keys * shape.kv_heads, own
    on_host = gcd(job.degree * job.stride, topology.ranks_per_host)
    near = max(1, on_host // job.stride)  # of the ranks that trade, on one host
    inside = min(near - 1, 1 if topology.direct_links else near)
    outside = (job.degree - near) * topology.ranks_per_nic
    qkv, out = (
        TradeCost(topology, outside * row * count, inside * row * count, job.degree - 1)
        for count in counts
    )
    return qkv, out


def ulysses_cost(job: Job) -> Cost:
    """Heads for tokens and back, around one pass: what hides behind nothing.

    Bytes are those of all chunks, memory that of the rows that a rank has pooled.
    """
    if job.degree == 1:
        return Cost((), 0, 0, 0)
    both, chunks = trade_costs(job), job.chunks
    names = ("ulysses qkv", "ulysses out")
    phases = tuple(Phase(name, one.transfer) for name, one in zip(names, both, strict=True))
    nic = chunks * sum(one.nic_bytes for one in both)
    inside = chunks * sum(one.inside_bytes for one in both)
    return Cost(phases, nic, inside, chunks * _pooled_bytes(job))


def _pooled_bytes(job: Job) -> float:
    """q, k, v and out of one chunk, of all rows that a rank pools."""
    shape, pooled = job.shape, job.degree / job.topology.size
    rows, keys = job.workload.seqlen * pooled, job.workload.num_keys * pooled
    row = shape.batch * shape.head_dim * shape.itemsize
    return 2 * row * (rows * shape.heads + keys * shape.kv_heads)


def pipelined(job: Job, cost: Cost) -> Cost:
    """The cost of all chunks, one after another, from that of one, with the trades meanwhile.

    Links carry the trades of other chunks beside what the pass itself sends, and before it: they
    are posted first. That the backward's go the other way round changes nothing in all.
    """
    if job.chunks == 1:
        return cost
    come, leave = trade_costs(job)
    last, took = job.chunks - 1, 0.0
    for at in range(job.chunks):
        beside = [come] * (at < last) + [leave] * (at > 0)
        held = cost.seconds + sum(one.hold_s for one in beside)
        held += _delay_s(job.topology, cost, beside)
        took += max(held, _links_s(job.topology, cost, beside))
    return replace(
        cost,
        phases=cost.phases * job.chunks,
        nic_bytes=cost.nic_bytes * job.chunks,
        inside_bytes=cost.inside_bytes * job.chunks,
        gathered_bytes=cost.gathered_bytes * job.chunks,
        seconds=took,
        compute_s=cost.compute_s * job.chunks,
    )


def _delay_s(topology: Topology, cost: Cost, beside: Sequence[TradeCost]) -> float:
    """How much longer a pass takes whose messages queue behind those exchanges.

    Those do not queue that go through links which the pass leaves alone.
    """
    nic_bytes = sum(one.nic_bytes for one in beside) if cost.nic_bytes else 0.0
    inside_bytes = sum(one.inside_bytes for one in beside) if cost.inside_bytes else 0.0
    far, near = topology.between.bytes_per_s, topology.inside.bytes_per_s
    free = max(nic_bytes / far, inside_bytes / near)
    return seconds(cost.phases, free) - seconds(cost.phases)


def _links_s(topology: Topology, cost: Cost, beside: Sequence[TradeCost]) -> float:
    """Until the busiest link has carried a pass and the exchanges beside it."""
    nic_bytes = cost.nic_bytes + sum(one.nic_bytes for one in beside)
    inside_bytes = cost.inside_bytes + sum(one.inside_bytes for one in beside)
    return max(topology.between.seconds(nic_bytes), topology.inside.seconds(inside_bytes))
