"""The head splits that a request allows: how many ranks trade heads for tokens, which, in how many
chunks.

Pure: standard library only.
"""

from __future__ import annotations

from math import gcd

from wf_backends.planner.plan import Request
from wf_backends.schedule import divisors

MOST_CHUNKS = 8  # of a rank's heads that the planner looks at


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

    1, and what brings as many ranks of a route onto a host as it has. Only 1 where nothing is won:
    on one host; and where tokens see only near ones, which are best on the same rank of the route.
    """
    topology, mask = request.topology, request.workload.mask
    pools = topology.size // degree
    if request.strides is not None:
        return [stride for stride in request.strides if pools % stride == 0]
    if degree == 1 or topology.hosts == 1 or mask.is_near:
        return [1]
    on_host = topology.ranks_per_host
    return sorted({1, on_host if pools % on_host == 0 else pools})


def legal_chunks(request: Request, degree: int) -> list[int]:
    """In how many chunks a rank's heads may be traded, rising.

    Each has whole groups of query heads. Only one where tokens see only near ones.
    """
    shape = request.workload.shape
    whole_groups = gcd(shape.heads // degree, max(1, shape.kv_heads // degree))
    chunks = divisors(whole_groups if shape.kv_heads % degree == 0 else 1)
    if request.chunks is not None:
        return [count for count in request.chunks if count in chunks and degree > 1 or count == 1]
    if degree == 1 or request.workload.mask.is_near:
        return [1]
    return [count for count in chunks if count <= MOST_CHUNKS]
