"""Head splits: which ranks may exchange heads for tokens, and in how many chunks."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from wf_backends._validation import listed
from wf_backends.cost import BACKWARD_KEYS, FORWARD, HeadSplit, ulysses_cost
from wf_backends.planner.plan import Request
from wf_backends.schedule import divisors

MAX_CHUNKS = 8  # the most chunks of a rank's heads that the planner looks at
MIN_HIDDEN_SHARE = 0.02  # of the computing time: chunks that can hide less are not looked at


def head_splits(request: Request, min_hidden_share: float = MIN_HIDDEN_SHARE) -> list[HeadSplit]:
    """The head splits to look at.

    Args:
        min_hidden_share: splits into several chunks are left out if they can hide less of the
            exchanges than this share of the computing time.

    Raises:
        ValueError: if no degree, or no number of chunks, of the request fits the ranks and heads.
    """
    shape, degrees = request.workload.shape, legal_degrees(request)
    if not degrees:
        raise ValueError(
            f"no ulysses_degree of {listed(request.degrees or ())} divides the "
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
        splits = [split for split in splits if split.chunks == 1 or _hides(split, min_hidden_share)]
    if not splits:
        raise ValueError(
            f"ulysses_chunks {listed(request.chunks or ())} divides neither the query nor the key "
            f"heads of a rank with any ulysses_degree of {listed(degrees)} ({shape.heads} heads, "
            f'{shape.kv_heads} key heads): leave it out, or "auto"'
        )
    return splits


def _hides(split: HeadSplit, share: float) -> bool:
    """Whether exchanges in chunks may hide more than this share of both passes' computing time, if
    ranks are evenly loaded: no plan computes for less long."""
    hidden_s = ulysses_cost(replace(split, chunks=1)).seconds - ulysses_cost(split).seconds
    score_s = sum(kind.seconds_per_score(split) for kind in (FORWARD, BACKWARD_KEYS))
    even_s = split.workload.scores / split.route_size * split.chunks * score_s
    return 2 * hidden_s > share * even_s


def legal_degrees(request: Request) -> list[int]:
    """The ulysses degrees that the ranks and heads allow, ascending."""
    shape = request.workload.shape
    return [
        degree
        for degree in divisors(request.topology.size)
        if shape.heads % degree == 0
        and (shape.kv_heads % degree == 0 or degree % shape.kv_heads == 0)
        and (request.degrees is None or degree in request.degrees)
    ]


def legal_strides(request: Request, degree: int) -> list[int]:
    """How far apart the ranks of a Ulysses group may be, ascending.

    1, and the stride with which all ranks of a host are in different groups. Only 1 where that
    gains nothing: on one host, and where tokens see only near ones, best kept on the same rank.
    """
    topology, mask = request.topology, request.workload.mask
    groups = topology.size // degree
    if request.strides is not None:
        return [stride for stride in request.strides if groups % stride == 0]
    if degree == 1 or topology.hosts == 1 or mask.is_near:
        return [1]
    per_host = topology.ranks_per_host
    return sorted({1, per_host if groups % per_host == 0 else groups})


def legal_chunks(request: Request, degree: int) -> list[int]:
    """In how many chunks a rank's heads may be exchanged, ascending.

    Each chunk has whole groups of query heads. Only one under windows, documents or slices.
    """
    shape, legal = request.workload.shape, [1]
    if degree > 1 and shape.kv_heads % degree == 0:
        legal = divisors(gcd(shape.heads // degree, shape.kv_heads // degree))
    if request.chunks is not None:
        return [count for count in request.chunks if count in legal]
    if not request.workload.mask.is_dense:
        return [1]
    return [count for count in legal if count <= MAX_CHUNKS]
