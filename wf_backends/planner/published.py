"""The schemes that papers name, each with its best settings on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import Choice, Plan, Request, ranked
from wf_backends.planner.search import price_plan
from wf_backends.schedule import placements


def named_schemes(ring: Plan, request: Request, size: int) -> dict[str, Plan | str]:
    """The best plan of each scheme that papers name, with ranks in order; or why there is none.

    The request's ranks may stand for all `size` ranks.
    """
    num_ranks, shape = request.topology.size, request.workload.shape
    degrees = legal_degrees(replace(request, degrees=None))
    no_ulysses = f"not on {size} ranks with {shape.heads} heads and {shape.kv_heads} key heads"
    no_teams = f"needs teams whose number squared divides {size}"
    if num_ranks != size:
        degrees = [degree for degree in degrees if degree < num_ranks]
        no_ulysses = no_teams = f"not predicted where {num_ranks} ranks stand for all"

    def best(degrees: Sequence[int], route: str, why_not: str) -> Plan | str:
        plans = [
            price_plan(request, Choice(degree, placed, placed))
            for degree in degrees
            for placed in placements(num_ranks // degree)
            if placed.in_rank_order and placed.route["name"] == route
        ]
        return ranked(plans, request)[0] if plans else why_not

    partial_degrees = [degree for degree in degrees if 1 < degree < num_ranks]
    no_partial = "no ulysses_degree between 1 and all ranks fits the heads"
    return {
        "Ring Attention": ring,
        "Ulysses": best([num_ranks] if num_ranks in degrees else [], "ring", no_ulysses),
        "USP": best(partial_degrees, "ring", no_partial),
        "StarTrail": best([1] if num_ranks == size else [], "concentric", no_teams),
        "all-gather": best([1], "all_gather", "one rank has all"),
    }
