"""The schemes that the lab compares, as priced plans, and the attention that runs a plan.

A named scheme has what its config says: rank order, the same route forward and backward, keys
walking. `auto` is the planner's choice for the same call; its backward may use what the forward
has gathered and kept. For packed documents the planner gets what a call gives it, the kind of
documents and not their borders.
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
from wf_backends.schedule.placement import default_placement, divisors, read_placed

RING = "ring"
AUTO = "auto"
KEEPS_NOTHING = "auto, gathers again"  # the backward gathers again what the forward gathered
WHOLE_HEADS = "auto, heads at once"  # without ulysses_chunks; only if auto has chosen them
TO_EACH_READER = "auto, to each reader"  # without host_size; only if auto has chosen it
ONE_DOCUMENT = "auto, one document"  # planned without the document borders
BASELINES = ("USP", "double ring")  # prefixes of scheme names


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name and a plan with its price."""

    name: str
    plan: Plan

    @property
    def plan_line(self) -> str:
        """The plan on one line."""
        plan = self.plan.choice
        degree = f"u={head_split(plan)} x " if plan.degree > 1 else ""
        walkers = ", queries walk" if plan.moves == "queries" else ""
        kept = ", kept" if plan.keep else ""
        return f"{degree}{plan.forward} | {plan.backward}{walkers}{kept}"


def head_split(choice: Choice) -> str:
    """The head split of a choice as text."""
    texts = [str(choice.degree)]
    texts += [f"{choice.stride} apart"] if choice.stride > 1 else []
    texts += [f"{choice.chunks} chunks"] if choice.chunks > 1 else []
    return ", ".join(texts)


def named_plan(request: Request, degree: int, moves: str = "keys", **route: Any) -> Plan | None:
    """The priced plan of a named scheme; None if it does not fit the ranks or heads."""
    if degree not in legal_degrees(request):
        return None
    try:
        placed = read_placed(route, request.topology.size // degree)
    except ValueError:  # such as a team size whose square does not divide the ranks
        return None
    return price_plan(request, Choice(degree, placed, placed, moves))


def square_mesh(size: int) -> dict[str, Any]:
    """The route of the mesh that is closest to a square."""
    rows = min(divisors(size), key=lambda d: abs(d - size**0.5))
    return {"name": "mesh", "rows": rows, "cols": size // rows}


def schemes(request: Request) -> list[Scheme]:
    """Every named scheme that fits the ranks and heads, and `auto`, all priced by `request`.

    Args:
        request: with the real documents; prices count every message.
    """
    result: list[Scheme] = []
    for name, degree, size, route in named_schemes(request):
        placed = default_placement(route, size)
        result.append(Scheme(name, price_plan(request, Choice(degree, placed, placed))))
    for name, route in host_size_schemes(request):
        placed = read_placed(route, request.topology.size)
        moves = "queries" if placed.keys_stay else "keys"
        result.append(Scheme(name, price_plan(request, Choice(1, placed, placed, moves))))
    for name, plan in auto_plans(request):
        result.append(Scheme(name, price_plan(request, plan.choice)))
    return result


def auto_plans(request: Request) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of the planner's choices, as an attention call gets them."""
    mask = request.workload.mask
    yield KEEPS_NOTHING, _planned(request, mask, keep_gathered=False)
    auto = _planned(request, mask)
    yield AUTO, auto
    if auto.choice.chunks > 1:
        yield WHOLE_HEADS, _planned(request, mask, ulysses_chunks=1)
    if auto.choice.forward.host_size > 1 or auto.choice.backward.host_size > 1:
        yield TO_EACH_READER, without_host_size(auto)
    if mask.cu_seqlens is not None:
        yield ONE_DOCUMENT, _planned(request, Mask(mask.band))


def without_host_size(plan: Plan) -> Plan:
    """The same plan, but a row is sent to each rank of a host that reads it."""
    choice = plan.choice
    forward = replace(choice.forward, host_size=1)
    backward = replace(choice.backward, host_size=1)
    return replace(plan, choice=replace(choice, forward=forward, backward=backward))


def _planned(request: Request, mask: Mask, **options: Any) -> Plan:
    """The plan of a call with this mask, under a config with these options only."""
    workload = request.workload
    options = {"keep_gathered": "auto", "layout": workload.layout, **options}
    config = SequenceParallelConfig(sequence_parallel_size=request.topology.size, **options)
    return plan_for(request_of(config, workload.shape, workload.seqlen, mask, request.topology))


def named_schemes(request: Request) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """(name, ulysses degree, ranks of the route, route)."""
    size, per_host = request.topology.size, request.topology.ranks_per_host
    inner = [d for d in divisors(size) if 1 < d < size]
    yield RING, 1, size, {"name": "ring"}
    if 1 < per_host < size:
        yield f"double ring {per_host}", 1, size, {"name": "double_ring", "inner": per_host}
    yield "all-gather", 1, size, {"name": "all_gather"}
    for rows in inner:
        route = {"name": "mesh", "rows": rows, "cols": size // rows}
        yield f"mesh {rows} x {size // rows}", 1, size, route
    for team in inner:
        if size % team**2 == 0:
            yield f"concentric C={team}", 1, size, {"name": "concentric", "team_size": team}
    for degree in legal_degrees(request):
        if 1 < degree < size:
            yield f"USP {degree} x {size // degree}", degree, size // degree, {"name": "ring"}
        if degree == size > 1:
            yield "Ulysses", degree, 1, {"name": "ring"}


def host_size_schemes(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, route) of schemes that send a row to a host once for all ranks that read it there."""
    size, per_host = request.topology.size, request.topology.ranks_per_host
    if not 1 < per_host < size:
        return
    yield "all-gather, once", {"name": "all_gather", "host_size": per_host}
    for rows in divisors(size):
        if per_host < rows < size and rows % per_host == 0:
            route = {"name": "mesh", "rows": rows, "cols": size // rows, "host_size": per_host}
            yield f"mesh {rows} x {size // rows}, once", route


def make_attention(plan: Plan, layout: str, comm: Communicator) -> SequenceParallel:
    """The attention that runs a plan."""
    return SequenceParallel(
        SequenceParallelConfig.from_dict(plan.choice.to_config(comm.size, layout)), comm
    )
