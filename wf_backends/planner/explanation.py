"""Plans as text: the names of schemes in papers, and why a plan was chosen."""

from __future__ import annotations

from math import floor, log10

from wf_backends.planner.plan import TIE, Plan, Request, busiest_link
from wf_backends.planner.proxy import representative
from wf_backends.schedule import Placed


def reason(plan: Plan, request: Request) -> str:
    """The plan of a call, and why it was chosen, in one sentence.

    Args:
        request: of the call; the sentence is about all calls that share its plan.
    """
    planned = representative(request)
    seqlen = planned.workload.seqlen * request.topology.size // planned.topology.size
    cost = plan.cost
    link, _, sent = busiest_link(cost, request.topology)
    why = f"of all plans within {TIE:.0%} of the fastest it sends the least, {sent / 1e9:.3g} GB"
    why = f"{why} through {link}" if sent else "it sends nothing"
    time = f"{milliseconds(cost.seconds)} ms predicted for forward and backward"
    return f"{scheme(plan, request.topology.size)} for {seqlen:,} tokens: {time}; {why}"


def scheme(plan: Plan, size: int) -> str:
    """What a plan runs on `size` ranks, by its name in the field."""
    choice = plan.choice
    route_size = size // choice.degree
    forward, backward = (_route_name(p, route_size) for p in (choice.forward, choice.backward))
    routes = forward if forward == backward else f"{forward} forward, {backward} backward"
    is_ring = routes == f"ring {route_size}"
    if choice.degree == size > 1:
        name = f"Ulysses {size}"
    elif choice.degree > 1:
        family = "USP, " if is_ring else ""
        name = f"{family}Ulysses {choice.degree} x {routes}"
    else:
        name = "Ring Attention" if is_ring else routes
    details = {
        f"its ranks {choice.stride} apart": choice.stride > 1,
        f"heads in {choice.chunks} parts": choice.chunks > 1,
        "queries move back": choice.moves == "queries",
        "gathered rows kept": choice.keep,
    }
    return ", ".join([name, *(detail for detail, holds in details.items() if holds)])


def _route_name(placed: Placed, size: int) -> str:
    """A route for `size` ranks and its placement, as text."""
    route = placed.route
    match route["name"]:
        case "double_ring":
            name = f"double ring {size // route['inner']} x {route['inner']}"
        case "concentric":
            name = f"StarTrail with teams of {route['team_size']}"
        case "mesh":
            name = f"mesh {route['rows']} x {route['cols']}"
        case other:
            name = f"{other.replace('_', '-')} {size}"
    digits = f" (digits {'-'.join(map(str, placed.order))})" if not placed.in_rank_order else ""
    once = f", rows once to hosts of {placed.host_size}" if placed.host_size > 1 else ""
    return f"{name}{digits}{once}"


def milliseconds(seconds: float) -> str:
    """Milliseconds as text: four significant digits, at most four behind the point."""
    value = 1e3 * seconds
    exponent = floor(log10(value)) if value else 3
    return f"{value:,.{min(4, max(0, 3 - exponent))}f}"
