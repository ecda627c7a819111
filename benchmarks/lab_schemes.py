"""The schemes that the lab compares, as plans with their prices, and how a plan is run.

A named scheme is what a config names: its parts in rank order, the same route forward and
backward, keys walking. `auto` is the planner's own choice for the same call, in which the backward
may find what the forward gathered still in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.cost import Job
from wf_backends.placement import divisors, in_rank_order
from wf_backends.planner import best_plan, legal_degrees, price_plan
from wf_backends.plans import Plan, Request
from wf_backends.search import Pricing

RING = "ring"
AUTO = "auto"
AGAIN = "auto, gathers again"  # in the backward, whatever the memory
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
        kept = ", kept" if plan.keep else ""
        return f"{degree}{plan.forward.placed} | {plan.backward.placed}{walk}{kept}"


def schemes(request: Request, automatic: Request) -> list[Scheme]:
    """Every named scheme that the ranks and heads allow, and `auto`, priced alike.

    Args:
        request: by which all are priced.
        automatic: what the planner is asked for.
    """
    found: list[Scheme] = []
    for name, degree, size, route in named(request):
        placed = in_rank_order(route, size)
        found.append(Scheme(name, price_plan(request, degree, placed, placed)))
    for name, keeps in ((AGAIN, (False,)), (AUTO, (False, True))):
        best = best_plan(replace(automatic, keeps=keeps))
        found.append(Scheme(name, priced_alike(request, best)))
    return found


def priced_alike(request: Request, plan: Plan) -> Plan:
    """The plan with the price that the request's way of counting gives it."""
    placed, job = plan.choice, Job(request.workload, request.topology, plan.degree)
    forward, backward = (
        Pricing(request, job, one.walk).price(at)
        for one, at in ((plan.forward, placed.forward), (plan.backward, placed.backward))
    )
    return replace(plan, forward=forward, backward=backward)


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


def attention_of(plan: Plan, layout: str, comm: Communicator) -> SequenceParallel:
    """Attention by the config that names the plan."""
    return SequenceParallel(
        SequenceParallelConfig.from_dict(plan.to_config(comm.size, layout)), comm
    )
