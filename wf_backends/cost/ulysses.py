"""What exchanging heads for tokens (the Ulysses exchanges) costs, all heads at once or in chunks.

Where heads are exchanged in chunks (runtime/ulysses.py), one chunk travels while another
is computed: only the first chunk's exchange of q, k and v and the last chunk's of out are exposed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import lcm

from wf_backends.cluster import Topology
from wf_backends.cost.route_shape import NOTHING, LinkBytes
from wf_backends.cost.workload import Cost, HeadSplit, Span
from wf_backends.lowering import UlyssesGroups


def exchange_bytes(split: HeadSplit) -> tuple[LinkBytes, LinkBytes]:
    """The bytes of one chunk's exchanges: (of q, k and v, which go together, of out).

    The backward exchanges as many bytes, of gradients, in the opposite order.
    """
    topology, workload = split.topology, split.workload
    by_nic, inside = _busiest_parts(split.groups, topology)
    lengths = workload.seqlen, workload.num_keys
    rows = (-(-length // topology.size) for length in lengths)  # of a rank, rounded up
    qkv, out = (LinkBytes(by_nic * n, inside * n) for n in _qkv_and_out_bytes(split, *rows))
    return qkv, out


@lru_cache(maxsize=256)
def _busiest_parts(groups: UlyssesGroups, topology: Topology) -> tuple[int, int]:
    """The parts, one for each peer in a group, that the busiest NIC and the busiest rank's link
    inside its host send."""
    period = lcm(groups.degree * groups.stride, topology.ranks_per_host)  # then all repeats
    by_nic, most_on_host = Counter[int](), 1
    for group in range(period // groups.degree):
        members = groups.members(group)
        on_host = Counter(map(topology.host, members))
        most_on_host = max(most_on_host, *on_host.values())
        for rank in members:
            by_nic[topology.nic(rank)] += groups.degree - on_host[topology.host(rank)]
    inside = most_on_host - 1
    return max(by_nic.values()), min(1, inside) if topology.direct_links else inside


def _qkv_and_out_bytes(split: HeadSplit, queries: float, keys: float) -> tuple[float, float]:
    """(bytes of q, k and v, bytes of out) of a chunk of heads, for so many rows of each side."""
    shape = split.shape
    width_bytes = shape.batch * shape.heads * shape.itemsize  # of a row with one element a head
    qkv = queries * width_bytes * shape.head_dim + keys * shape.key_row * shape.itemsize
    return qkv, queries * width_bytes * shape.value


def exchange_seconds(split: HeadSplit, sent: LinkBytes) -> float:
    """Seconds of an exchange: bytes / rate of the busiest link + max(latency, `min_exchange_s`)."""
    topology, min_s = split.topology, min_exchange_s(split)
    links = (topology.inside, sent.inside), (topology.between, sent.nic)
    seconds = (n / link.bytes_per_s + max(link.latency_s, min_s) for link, n in links if n)
    return max(seconds, default=0.0)  # an empty batch sends nothing


def min_exchange_s(split: HeadSplit) -> float:
    """Seconds of an exchange of a few bytes, latency not included.

    As measured on a whole host. Where it was not measured: the time for which the messages keep a
    rank from computing, which sends q, k and v to every peer and receives as many.
    """
    topology, peers = split.topology, split.degree - 1
    return topology.exchange_s or topology.hold_s(0.0, messages=2 * 3 * peers)


def exchange_hold_s(split: HeadSplit, sent: LinkBytes) -> float:
    """Seconds for which an exchange with all peers keeps a rank from computing."""
    hold_s = sent.hold_s(split.topology, messages=split.degree - 1)
    return max(hold_s, split.topology.occupied * min_exchange_s(split))


def ulysses_cost(split: HeadSplit) -> Cost:
    """Heads for tokens and back, once around one pass: the exchanges that nothing hides.

    Bytes are those of all chunks, memory that of the rows that a rank has gathered.
    """
    cost, chunks = Cost(), split.chunks
    if split.degree == 1:
        return cost
    for name, sent in zip(("ulysses qkv", "ulysses out"), exchange_bytes(split), strict=True):
        seconds = exchange_seconds(split, sent)
        spans = (Span(name, "transfer", 0.0, seconds),)
        cost += Cost(seconds, 0.0, seconds, chunks * sent.nic, chunks * sent.inside, spans=spans)
    share, workload = split.degree / split.topology.size, split.workload
    gathered = _qkv_and_out_bytes(split, workload.seqlen * share, workload.num_keys * share)
    return replace(cost, memory_bytes=chunks * sum(gathered))


def pipelined(split: HeadSplit, chunk_cost: Cost) -> Cost:
    """The cost of a pass over all chunks, one after another, while others are exchanged.

        T = sum over chunks of max(T_chunk + holds, the busiest link's bytes / its rate)

    where the link also carries the exchanges before and after the chunk. The backward has the same
    exchanges in the opposite order, which gives the same sum.

    Args:
        chunk_cost: what a pass over one chunk costs by itself.
    """
    if split.chunks == 1:
        return chunk_cost
    qkv, out = exchange_bytes(split)
    total = Cost()
    for exchanges in ([qkv], *[[qkv, out]] * (split.chunks - 2), [out]):
        hold_s = sum(exchange_hold_s(split, sent) for sent in exchanges)
        carried = LinkBytes(chunk_cost.nic_bytes, chunk_cost.inside_bytes) + sum(exchanges, NOTHING)
        seconds = max(chunk_cost.seconds + hold_s, carried.seconds(split.topology))
        total += replace(chunk_cost, seconds=seconds)
    return total
