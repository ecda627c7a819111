"""What trading heads for tokens costs, and what of it the passes hide.

Where heads are traded in chunks (runtime/ulysses_pipeline.py), one is
on its way while another is computed. The way in of the first and the way out of the last hide
behind nothing, the others behind the passes.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from wf_backends.planner.link_loads import NOTHING, Load
from wf_backends.planner.workload import Cost, HeadSplit, Span


def exchange_loads(split: HeadSplit) -> tuple[Load, Load]:
    """Bytes of one chunk: q, k and v in one exchange, out in another.

    The backward's gradients weigh the same, the other way round.
    """
    topology, shape = split.topology, split.shape
    element = shape.batch * shape.itemsize
    rows, keys = (-(-n // topology.size) for n in (split.workload.seqlen, split.workload.num_keys))
    queries, out = (rows * shape.heads * width for width in (shape.head_dim, shape.value))
    kv = keys * shape.key_row // shape.batch
    on_host = gcd(split.degree * split.stride, topology.ranks_per_host)
    near = max(1, on_host // split.stride)  # of the ranks that trade, on one host
    inside = min(near - 1, 1 if topology.direct_links else near)
    outside = (split.degree - near) * topology.ranks_per_nic
    qkv, out = (
        Load(outside * element * count, inside * element * count) for count in (queries + kv, out)
    )
    return qkv, out


def exchange_s(split: HeadSplit, load: Load) -> float:
    """bytes / rate of the busiest link + max(latency, what the smallest exchange takes)."""
    at = split.topology
    link, sent = max(
        ((at.inside, load.inside), (at.between, load.nic)),
        key=lambda pair: pair[0].seconds(pair[1]),
    )
    return sent / link.bytes_per_s + max(link.latency_s, smallest_s(split))


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
    if split.degree == 1:
        return Cost()
    cost = Cost()
    for name, load in zip(("ulysses qkv", "ulysses out"), exchange_loads(split), strict=True):
        took = exchange_s(split, load)
        sent = split.chunks * load.nic, split.chunks * load.inside
        cost += Cost(took, 0.0, took, *sent, spans=(Span(name, "transfer", 0.0, took),))
    return replace(cost, memory_bytes=split.chunks * _pooled_bytes(split))


def _pooled_bytes(split: HeadSplit) -> float:
    """q, k, v and out of one chunk, of all rows that a rank gathers."""
    shape, share = split.shape, split.degree / split.topology.size
    rows, keys = split.workload.seqlen * share, split.workload.num_keys * share
    width = shape.head_dim + shape.value
    queries = shape.batch * rows * shape.heads * width
    return shape.itemsize * (queries + keys * shape.key_row)


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
    for count, beside in ((1, [come]), (split.chunks - 2, [come, leave]), (1, [leave])):
        held = one.seconds + sum(exchange_hold_s(split, load) for load in beside)
        carried = Load(one.nic_bytes, one.inside_bytes) + sum(beside, NOTHING)
        chunk = replace(one, seconds=max(held, carried.seconds(split.topology)))
        for _ in range(count):
            total += chunk
    return total
