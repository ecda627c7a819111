"""Trading heads for tokens: which ranks may, in how many chunks, and what it costs.

Where heads are traded in chunks (runtime/ulysses_pipeline.py), one is on its way while another is
computed. The way in of the first and the way out of the last hide behind nothing, the others behind
the passes.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from wf_backends.planner.plan import Request
from wf_backends.planner.route_shape import NOTHING, Axis, Load, Side
from wf_backends.planner.workload import BACKWARD_KEYS, FORWARD, Cost, HeadSplit, Span
from wf_backends.schedule import divisors

MAX_CHUNKS = 8  # of a rank's heads that the planner looks at
MIN_HIDDEN_SHARE = 0.02  # of the computing time that chunks must be able to hide, to be looked at


def head_splits(request: Request, min_hidden_share: float = MIN_HIDDEN_SHARE) -> list[HeadSplit]:
    """The head splits to look at.

    Args:
        min_hidden_share: how much of the exchanges chunks must be able to hide, as a share of what
            is computed.

    Raises:
        ValueError: if no degree, or no number of chunks, that is wanted fits the ranks and heads.
    """
    shape, degrees = request.workload.shape, legal_degrees(request)
    if not degrees:
        raise ValueError(
            f"no ulysses_degree of {request.degrees or 'any size'} divides the "
            f"{request.topology.size} ranks and {shape.heads} heads, and divides the "
            f"{shape.kv_heads} key heads or is a multiple of them; 1 always does"
        )
    splits = [
        HeadSplit(request.workload, request.topology, degree, stride, chunks)
        for degree in degrees
        for stride in legal_strides(request, degree)
        for chunks in legal_chunks(request, degree)
    ]
    if request.chunks is None:
        splits = [one for one in splits if one.chunks == 1 or _hides(one, min_hidden_share)]
    if not splits:
        raise ValueError(
            f"ulysses_chunks {request.chunks} divides neither the query nor the key heads of a "
            f"rank with any ulysses_degree of {degrees} ({shape.heads} heads, {shape.kv_heads} key "
            'heads): leave it out, or "auto"'
        )
    return splits


def _hides(split: HeadSplit, share: float) -> bool:
    """Whether exchanges in chunks may hide more than this share of the time of computing, in both
    passes, if every rank has the same part of it: no plan takes less."""
    hidden_s = ulysses_cost(replace(split, chunks=1)).seconds - ulysses_cost(split).seconds
    score_s = sum(kind.seconds_per_score(split) for kind in (FORWARD, BACKWARD_KEYS))
    even_s = split.workload.scores / split.route_size * split.chunks * score_s
    return 2 * hidden_s > share * even_s


def around(split: HeadSplit) -> Cost:
    """The cost around both passes: the check that all ranks make the same call, once, and the
    exchanges of heads."""
    took, exchanges = split.topology.agreement_s, ulysses_cost(split)
    spans = (Span("agreement", "transfer", 0.0, took),) if took else ()
    return Cost(took, transfer_s=took, spans=spans) + exchanges + exchanges


def legal_degrees(request: Request) -> list[int]:
    """The ulysses degrees that the ranks and heads allow, rising."""
    shape = request.workload.shape
    return [
        degree
        for degree in divisors(request.topology.size)
        if shape.heads % degree == 0
        and (shape.kv_heads % degree == 0 or degree % shape.kv_heads == 0)
        and (request.degrees is None or degree in request.degrees)
    ]


def legal_strides(request: Request, degree: int) -> list[int]:
    """How far apart the ranks may be that trade heads for tokens, rising.

    1, and what brings as many groups of ranks onto a host as it has ranks. Only 1 where nothing is
    won: on one host; and where tokens see only near ones, which are best on the same rank.
    """
    topology, mask = request.topology, request.workload.mask
    groups = topology.size // degree
    if request.strides is not None:
        return [stride for stride in request.strides if groups % stride == 0]
    if degree == 1 or topology.hosts == 1 or mask.is_near:
        return [1]
    on_host = topology.ranks_per_host
    return sorted({1, on_host if groups % on_host == 0 else groups})


def legal_chunks(request: Request, degree: int) -> list[int]:
    """In how many chunks a rank's heads may be traded, rising.

    Each has whole groups of query heads. Only one under windows, documents or slices.
    """
    shape = request.workload.shape
    whole_groups = gcd(shape.heads // degree, max(1, shape.kv_heads // degree))
    chunks = divisors(whole_groups if shape.kv_heads % degree == 0 else 1)
    if request.chunks is not None:
        return [count for count in request.chunks if count in chunks and degree > 1 or count == 1]
    if degree == 1 or not request.workload.mask.is_dense:
        return [1]
    return [count for count in chunks if count <= MAX_CHUNKS]


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
