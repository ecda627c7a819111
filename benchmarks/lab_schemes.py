"""The schemes that the lab compares, as plans with their prices, and how a plan is run.

A named scheme is what a config names: its parts in rank order, the same route forward and
backward, keys walking. `auto` is the planner's own choice for the same call, in which the backward
may find what the forward gathered still in memory. Of packed documents it is told what a call tells
it: of which kind they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.parallel.choose import request_of
from wf_backends.planner import legal_degrees
from wf_backends.planner.plan import Choice, Plan, Request
from wf_backends.planner.search import plan_for, price_plan
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.placement import divisors, in_rank_order, read_placed

RING = "ring"
AUTO = "auto"
AGAIN = "auto, gathers again"  # in the backward, whatever the memory
AT_ONCE = "auto, heads at once"  # where heads are traded in chunks
READERS = "auto, to each reader"  # where rows cross to a host once
UNTOLD = "auto, one document"  # as if nobody had told it that there are many
BASELINES = ("USP", "double ring")  # schemes whose names begin so


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name and a plan with its price."""

    name: str
    plan: Plan

    @property
    def words(self) -> str:
        """The plan on one line."""
        plan = self.plan.choice
        degree = f"u={plan.split} x " if plan.degree > 1 else ""
        walk = ", queries walk" if plan.moves == "queries" else ""
        kept = ", kept" if plan.keep else ""
        return f"{degree}{plan.forward} | {plan.backward}{walk}{kept}"


def named_plan(request: Request, degree: int, moves: str = "keys", **route: Any) -> Plan | None:
    """The plan of a scheme with a name, priced; None where ranks or heads do not fit it."""
    if degree not in legal_degrees(request):
        return None
    try:
        placed = read_placed(route, request.topology.size // degree)
    except ValueError:  # a team size whose square does not divide, and the like
        return None
    return price_plan(request, Choice(degree, placed, placed, moves))


def square_mesh(size: int) -> dict[str, Any]:
    """The route of a mesh that is nearly square."""
    rows = min(divisors(size), key=lambda d: abs(d - size**0.5))
    return {"name": "mesh", "rows": rows, "cols": size // rows}


def schemes(request: Request) -> list[Scheme]:
    """Every named scheme that the ranks and heads allow, and `auto`, priced alike.

    Args:
        request: by which all are priced, message by message, with the real documents.
    """
    found: list[Scheme] = []
    for name, degree, size, route in named(request):
        placed = in_rank_order(route, size)
        found.append(Scheme(name, price_plan(request, Choice(degree, placed, placed))))
    for name, route in once(request):
        placed = read_placed(route, request.topology.size)
        moves = "queries" if placed.keys_stay else "keys"
        found.append(Scheme(name, price_plan(request, Choice(1, placed, placed, moves))))
    for name, plan in answers(request):
        found.append(Scheme(name, price_plan(request, plan.choice)))
    return found


def answers(request: Request) -> Iterator[tuple[str, Plan]]:
    """The planner's own choices, as an attention call gets them."""
    mask = request.workload.mask
    yield AGAIN, _answer(request, mask, keep_gathered=False)
    yield AUTO, (auto := _answer(request, mask))
    if auto.choice.chunks > 1:
        yield AT_ONCE, _answer(request, mask, ulysses_chunks=1)
    if any(one.host_size > 1 for one in (auto.choice.forward, auto.choice.backward)):
        yield READERS, to_each_reader(auto)
    if mask.cu_seqlens is not None:
        yield UNTOLD, _answer(request, Mask(mask.band))


def to_each_reader(plan: Plan) -> Plan:
    """The same plan with rows that cross to a host once for each rank that reads them."""
    choice = plan.choice
    forward, backward = (replace(one, host_size=1) for one in (choice.forward, choice.backward))
    return replace(plan, choice=replace(choice, forward=forward, backward=backward))


def _answer(request: Request, mask: Mask, **words: Any) -> Plan:
    """What a call under this mask gets, where the config says no more than these words."""
    size, work = request.topology.size, request.workload
    words = {"keep_gathered": "auto", "layout": work.layout, **words}
    config = SequenceParallelConfig(sequence_parallel_size=size, **words)
    return plan_for(request_of(config, work.shape, work.seqlen, mask, request.topology))


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


def once(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, route) of schemes on which several ranks of a host read a row that crosses once."""
    size, per_host = request.topology.size, request.topology.ranks_per_host
    if not 1 < per_host < size:
        return
    yield "all-gather, once", {"name": "all_gather", "host_size": per_host}
    for rows in (d for d in divisors(size) if per_host < d < size and d % per_host == 0):
        words = {"name": "mesh", "rows": rows, "cols": size // rows, "host_size": per_host}
        yield f"mesh {rows} x {size // rows}, once", words


def attention_of(plan: Plan, layout: str, comm: Communicator) -> SequenceParallel:
    """Attention by the config that names the plan."""
    return SequenceParallel(
        SequenceParallelConfig.from_dict(plan.choice.to_config(comm.size, layout)), comm
    )
