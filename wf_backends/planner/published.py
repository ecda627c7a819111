"""The schemes that papers name, each with its best settings on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import Choice, Plan, Request, ranked
from wf_backends.planner.search import price_plan
from wf_backends.schedule import default_placement, divisors


def named_schemes(ring: Plan, request: Request, size: int) -> dict[str, Plan | str]:
    """The best plan of each scheme that papers name, with ranks in order; or why there is none.

    The request's ranks may stand for all `size` ranks.
    """
    num_ranks, shape = request.topology.size, request.workload.shape
    degrees = legal_degrees(replace(request, degrees=None))
    teams = [team for team in divisors(num_ranks) if team > 1 and num_ranks % team**2 == 0]
    no_ulysses = f"not on {size} ranks with {shape.heads} heads and {shape.kv_heads} key heads"
    no_teams = f"needs teams whose number squared divides {size}"
    if num_ranks != size:
        degrees, teams = [degree for degree in degrees if degree < num_ranks], []
        no_ulysses = no_teams = f"not predicted where {num_ranks} ranks stand for all"

    def best(settings: Iterable[tuple[int, dict[str, object]]], why_not: str) -> Plan | str:
        plans = list[Plan]()
        for degree, route in settings:
            placed = default_placement(route, num_ranks // degree)
            plans.append(price_plan(request, Choice(degree, placed, placed)))
        return ranked(plans, request)[0] if plans else why_not

    ring_route: dict[str, object] = {"name": "ring"}
    partial_degrees = [(degree, ring_route) for degree in degrees if 1 < degree < num_ranks]
    with_teams: list[tuple[int, dict[str, object]]]
    with_teams = [(1, {"name": "concentric", "team_size": team}) for team in teams]
    return {
        "Ring Attention": ring,
        "Ulysses": best([(num_ranks, ring_route)] if num_ranks in degrees else [], no_ulysses),
        "USP": best(partial_degrees, "no ulysses_degree between 1 and all ranks fits the heads"),
        "StarTrail": best(with_teams, no_teams),
        "all-gather": best(
            [(1, {"name": "all_gather"})] if num_ranks > 1 else [], "one rank has all"
        ),
    }
