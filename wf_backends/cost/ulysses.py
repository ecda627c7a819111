"""What trading heads for tokens costs, all at once or in chunks.

Where heads are traded in chunks (runtime/ulysses_pipeline.py), one is on its way while another is
computed. The way in of the first and the way out of the last hide behind nothing, the others behind
the passes.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from wf_backends.cost.route_shape import NOTHING, Axis, Load, Side
from wf_backends.cost.workload import Cost, HeadSplit, Span


def around(split: HeadSplit) -> Cost:
    """The cost around both passes: the check that all ranks make the same call, once, and the
    exchanges of heads."""
    took, exchanges = split.topology.agreement_s, ulysses_cost(split)
    spans = (Span("agreement", "transfer", 0.0, took),) if took else ()
    return Cost(took, transfer_s=took, spans=spans) + exchanges + exchanges


def exchange_loads(split: HeadSplit) -> tuple[Load, Load]:
    """Bytes of one chunk: q, k and v in one exchange, out in another.

    The backward's gradients weigh the same, the other way round.
    """
    at, work = split.topology, split.workload
    near = max(1, gcd(split.degree * split.stride, at.ranks_per_host) // split.stride)
    peers = Side(split.degree, Axis(split.degree, near, leaving=0))
    qkv, out = _bytes(split, *(-(-rows // at.size) for rows in (work.seqlen, work.num_keys)))
    return peers.exchange(at, qkv), peers.exchange(at, out)


def _bytes(split: HeadSplit, rows: float, keys: float) -> tuple[float, float]:
    """Of q, k and v, and of out, of one chunk of a rank's heads and so many rows and keys."""
    shape = split.shape
    row = shape.batch * shape.heads * shape.itemsize
    qkv = rows * row * shape.head_dim + keys * shape.key_row * shape.itemsize
    return qkv, rows * row * shape.value


def exchange_s(split: HeadSplit, load: Load) -> float:
    """bytes / rate of the busiest link + max(latency, what the smallest exchange takes)."""
    at, least_s = split.topology, smallest_s(split)
    links = (at.inside, load.inside), (at.between, load.nic)
    return max(
        sent / link.bytes_per_s + max(link.latency_s, least_s) for link, sent in links if sent
    )


def smallest_s(split: HeadSplit) -> float:
    """Seconds of an exchange of hardly any bytes, beside its latency.

    As measured on a whole host; or else for how long its messages keep a rank from computing: q, k
    and v to every peer, and as many from it.
    """
    at, peers = split.topology, split.degree - 1
    return at.exchange_s or at.hold_s(0.0, messages=2 * 3 * peers)


def exchange_hold_s(split: HeadSplit, load: Load) -> float:
    """How long an exchange with all peers keeps a rank from computing."""
    held = load.hold_s(split.topology, messages=split.degree - 1)
    return max(held, split.topology.occupied * smallest_s(split))


def ulysses_cost(split: HeadSplit) -> Cost:
    """Heads for tokens and back, around one pass: what hides behind nothing.

    Bytes are those of all chunks, memory that of the rows that a rank has gathered.
    """
    cost, chunks = Cost(), split.chunks
    if split.degree == 1:
        return cost
    for name, load in zip(("ulysses qkv", "ulysses out"), exchange_loads(split), strict=True):
        took = exchange_s(split, load)
        spans = (Span(name, "transfer", 0.0, took),)
        cost += Cost(took, 0.0, took, chunks * load.nic, chunks * load.inside, spans=spans)
    share = split.degree / split.topology.size
    gathered = _bytes(split, split.workload.seqlen * share, split.workload.num_keys * share)
    return replace(cost, memory_bytes=chunks * sum(gathered))


def pipelined(split: HeadSplit, one: Cost) -> Cost:
    """The cost of all chunks, one after another, with the exchanges of others meanwhile.

        T = sum over chunks of max(T_one + holds, the busiest link's bytes / its rate)

    where the link also carries the exchanges before and after the chunk. That the backward's go the
    other way round changes nothing in all.

    Args:
        one: what a pass of one chunk costs by itself.
    """
    if split.chunks == 1:
        return one
    come, leave = exchange_loads(split)
    total = Cost()
    for beside in ([come], *[[come, leave]] * (split.chunks - 2), [leave]):
        held = one.seconds + sum(exchange_hold_s(split, load) for load in beside)
        carried = Load(one.nic_bytes, one.inside_bytes) + sum(beside, NOTHING)
        total += replace(one, seconds=max(held, carried.seconds(split.topology)))
    return total
