"""The schemes that the lab compares, as plans with their prices, and how a plan is run.

A named scheme is what a config names: its parts in rank order, the same route forward and
backward, keys walking. `auto` is the planner's own choice for the same call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wf_backends import SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.distributed_attention import DistributedAttention
from wf_backends.mask import Mask
from wf_backends.placement import divisors
from wf_backends.planner import best_plan, in_rank_order, legal_degrees, price_plan
from wf_backends.plans import Plan, Request
from wf_backends.schedule import Schedule
from wf_backends.traffic import Shape

RING = "ring"
AUTO = "auto"
BASELINES = ("USP", "double ring")  # schemes whose names begin so


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name and a plan with its price."""

    name: str
    plan: Plan

    @property
    def words(self) -> str:
        """The plan on one line."""
        plan = self.plan
        degree = f"u={plan.degree} x " if plan.degree > 1 else ""
        walk = ", queries walk" if plan.moves == "queries" else ""
        return f"{degree}{plan.forward.placed} | {plan.backward.placed}{walk}"


def schemes(request: Request, automatic: Request) -> list[Scheme]:
    """Every named scheme that the ranks and heads allow, and `auto`, priced alike.

    Args:
        request: by which all are priced.
        automatic: what the planner is asked for.
    """
    found = [
        Scheme(name, price_plan(request, degree, *2 * [in_rank_order(route, size)]))
        for name, degree, size, route in named(request)
    ]
    best = best_plan(automatic)
    both = best.forward.placed, best.backward.placed
    return [*found, Scheme(AUTO, price_plan(request, best.degree, *both, best.moves))]


def named(request: Request) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """(name, ulysses degree, ranks of the route, route)."""
    size, per_host = request.topology.size, request.topology.ranks_per_host
    inner = [d for d in divisors(size) if 1 < d < size]
    yield RING, 1, size, {"name": "ring"}
    if 1 < per_host < size:
        yield f"double ring {per_host}", 1, size, {"name": "double_ring", "inner": per_host}
    yield "all-gather", 1, size, {"name": "all_gather"}
    for rows in inner:
        words = {"name": "mesh", "rows": rows, "cols": size // rows}
        yield f"mesh {rows} x {size // rows}", 1, size, words
    for team in inner:
        if size % team**2 == 0:
            yield f"concentric C={team}", 1, size, {"name": "concentric", "team_size": team}
    for degree in legal_degrees(request):
        if 1 < degree < size:
            yield f"USP {degree} x {size // degree}", degree, size // degree, {"name": "ring"}
        if degree == size > 1:
            yield "Ulysses", degree, 1, {"name": "ring"}


class PlannedAttention(DistributedAttention):
    """Attention by a plan, placements and all, which a config cannot name."""

    def __init__(self, plan: Plan, layout: str, comm: Communicator) -> None:
        words = plan.to_config(comm.size, layout)
        super().__init__(SequenceParallelConfig.from_dict(words), comm)
        self._passes = plan.forward, plan.backward

    def _schedules(self, shape: Shape, seqlen: int, mask: Mask) -> tuple[Schedule, Schedule]:
        forward, backward = (one.schedule(self.config.route_size) for one in self._passes)
        return forward, backward
