"""The tables of `wallfacer plan`: in 80 columns the choice, the schemes that papers name, and what
else there is, rows with the same figures as one; or every plan with all figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.table import Table

from wf_backends.cli import options as o
from wf_backends.planner import (
    Choice,
    Plan,
    Request,
    legal_degrees,
    milliseconds,
    price_plan,
    ranked,
    scheme,
)
from wf_backends.schedule import divisors, in_rank_order

Cells = tuple[str, ...]


def full_table(plans: Sequence[Plan], ring: Plan, asked: Request, title: str) -> Table:
    """All plans in their order, with all figures, and the ring that they are compared with."""
    found = new_table(title, asked, "exposed ms")
    listed = ring.choice in [plan.choice for plan in plans]
    for plan in [*plans, *([] if listed else [ring])]:
        over = plan.cost.memory_bytes > asked.memory_limit
        exposed = milliseconds(plan.cost.exposed_s)
        found.add_row(*row(plan, ring, asked, exposed), style="dim" if over else None)
    return found


def short_table(
    plans: Sequence[Plan], ring: Plan, request: Request, asked: Request, title: str
) -> Table:
    """The first plan, named schemes beside it, then the other plans.

    Args:
        plans: the choice, and others, the best first. ring: the plain ring.
        request: what was priced, of which some ranks may stand for all. asked: for all ranks.
    """
    found = new_table(title, asked)
    choice, *others = plans
    found.add_row(*row(choice, ring, asked), style="bold", end_section=True)
    schemes = named_schemes(ring, request, asked.topology.size)
    for name, plan in schemes.items():
        if isinstance(plan, str):
            found.add_row(f"{name}: {plan}", *("-" for _ in found.columns[1:]))
        elif plan.choice != choice.choice:
            found.add_row(*row(plan, ring, asked))
    found.add_section()
    shown = [plan.choice for plan in (choice, *schemes.values()) if isinstance(plan, Plan)]
    rest = [plan for plan in others if plan.choice not in shown]
    for cells in folded(row(plan, ring, asked) for plan in rest):
        found.add_row(*cells)
    return found


def new_table(title: str, asked: Request, *more: str) -> Table:
    """A table with the columns of `row`."""
    nic = ["NIC GB"] if asked.topology.hosts > 1 else []
    figures = "ms", "x ring", *more, *nic, "inside GB", "MiB"
    return o.new_table(title, ["plan"], figures, no_wrap=True)


def named_schemes(ring: Plan, request: Request, size: int) -> dict[str, Plan | str]:
    """The schemes that papers name, ranks in order and all heads at once; or why there is none.

    Args:
        size: all ranks; those of the request may stand for them.
    """
    own, shape = request.topology.size, request.workload.shape
    degrees = legal_degrees(replace(request, degrees=None))
    teams = [team for team in divisors(own) if team > 1 and own % team**2 == 0]
    no_ulysses = f"not on {size} ranks with {shape.heads} heads and {shape.kv_heads} key heads"
    no_teams = f"needs teams whose number squared divides {size}"
    if own != size:
        degrees, teams = [d for d in degrees if d < own], []
        no_ulysses = no_teams = f"not predicted where {own} ranks stand for all"

    def best(pairs: Iterable[tuple[int, dict[str, object]]], why_not: str) -> Plan | str:
        placed = [(degree, in_rank_order(route, own // degree)) for degree, route in pairs]
        plans = [price_plan(request, Choice(degree, one, one)) for degree, one in placed]
        return ranked(plans, request)[0] if plans else why_not

    plain: dict[str, object] = {"name": "ring"}
    between = [(degree, plain) for degree in degrees if 1 < degree < own]
    return {
        "Ring Attention": ring,
        "Ulysses": best([(own, plain)] if own in degrees else [], no_ulysses),
        "USP": best(between, "no ulysses_degree between 1 and all ranks fits the heads"),
        "StarTrail": best(
            [(1, {"name": "concentric", "team_size": team}) for team in teams], no_teams
        ),
        "all-gather": best([(1, {"name": "all_gather"})] if own > 1 else [], "one rank has all"),
    }


def row(plan: Plan, ring: Plan, asked: Request, *more: str) -> Cells:
    """A plan and what is predicted of it."""
    cost = plan.cost
    nic = [f"{cost.nic_bytes / 1e9:.3g}"] if asked.topology.hosts > 1 else []
    over = " too much" if cost.memory_bytes > asked.memory_limit else ""
    return (
        scheme(plan, asked.topology.size),
        milliseconds(cost.seconds),
        f"{ring.cost.seconds / cost.seconds:.2f}",
        *more,
        *nic,
        f"{cost.inside_bytes / 1e9:.3g}",
        f"{cost.memory_bytes / 2**20:.4g}{over}",
    )


def folded(rows: Iterable[Cells]) -> Iterable[Cells]:
    """Rows with the same figures as one row, by the name of the first."""
    alike = dict[Cells, list[str]]()
    for name, *figures in rows:
        alike.setdefault(tuple(figures), []).append(name)
    for figures, (first, *others) in alike.items():
        yield first + (f" (and {len(others)} alike)" if others else ""), *figures
