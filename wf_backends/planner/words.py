"""Plans in words: the names that schemes have in papers, and why one was chosen."""

from __future__ import annotations

from math import floor, log10

from wf_backends.planner.plan import TIE, Choice, Plan, Request, busiest_link
from wf_backends.planner.proxy import alike
from wf_backends.schedule import Placed


def reason(plan: Plan, request: Request) -> str:
    """The plan of a call, and why it was chosen, in one sentence.

    Args:
        request: what was asked; the sentence is about the calls that are like it.
    """
    like = alike(request)
    tokens = f"{like.workload.seqlen * request.topology.size // like.topology.size:,} tokens"
    cost = plan.cost
    link, _, sent = busiest_link(cost, request.topology)
    why = f"of all plans within {TIE:.0%} of the fastest it sends the least, {sent / 1e9:.3g} GB"
    why = f"{why} through {link}" if sent else "it sends nothing"
    took = f"{milliseconds(cost.seconds)} ms predicted for forward and backward"
    return f"{scheme(plan, request.topology.size)} for {tokens}: {took}; {why}"


def scheme(plan: Plan, size: int) -> str:
    """What a plan runs on `size` ranks, by the names of the field."""
    choice = plan.choice
    count = size // choice.degree
    forward, backward = (_route(placed, count) for placed in (choice.forward, choice.backward))
    both = forward if forward == backward else f"{forward} forward, {backward} backward"
    if choice.degree == size > 1:
        name = f"Ulysses {size}"
    elif choice.degree > 1:
        family = "USP, " if both == f"ring {count}" else ""
        name = f"{family}Ulysses {choice.degree} x {both}"
    else:
        name = "Ring Attention" if both == f"ring {count}" else both
    return ", ".join([name, *_details(choice)])


def _details(choice: Choice) -> list[str]:
    """What a choice does beside its scheme."""
    details = [f"its ranks {choice.stride} apart"] if choice.stride > 1 else []
    details += [f"heads in {choice.chunks} parts"] if choice.chunks > 1 else []
    details += ["queries move back"] if choice.moves == "queries" else []
    return details + (["gathered rows kept"] if choice.keep else [])


def _route(placed: Placed, size: int) -> str:
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
    digits = f" (digits {'-'.join(map(str, placed.order))})" if not placed.in_order else ""
    once = f", rows once to hosts of {placed.host_size}" if placed.host_size > 1 else ""
    return f"{name}{digits}{' reversed' if placed.reverse else ''}{once}"


def milliseconds(seconds: float) -> str:
    """In milliseconds, with four digits, but none beyond a tenth of a microsecond."""
    value = 1e3 * seconds
    whole = floor(log10(value)) if value else 3
    return f"{value:,.{min(4, max(0, 3 - whole))}f}"
