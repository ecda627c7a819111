"""The tables of `wallfacer plan`: in 80 columns the choice, the schemes that papers name, and what
else there is, rows with the same figures as one; or every plan with all figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.table import Table

from wf_backends.cli.tables import table_of
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

Row = dict[str, str]


def full_table(plans: Sequence[Plan], ring: Plan, asked: Request, title: str) -> Table:
    """All plans in their order, with all figures, and the ring that they are compared with."""
    listed = ring.choice in [plan.choice for plan in plans]
    shown = [*plans] if listed else [*plans, ring]
    return table_of(title, [row(plan, ring, asked, exposed=True) for plan in shown])


def short_table(
    plans: Sequence[Plan], ring: Plan, request: Request, asked: Request, title: str
) -> Table:
    """The first plan, named schemes beside it, then the other plans.

    Args:
        plans: the choice, and others, the best first. ring: the plain ring.
        request: what was priced, of which some ranks may stand for all. asked: for all ranks.
    """
    choice, *others = plans
    best = row(choice, ring, asked)
    schemes = named_schemes(ring, request, asked.topology.size)
    named = list[Row]()
    for name, plan in schemes.items():
        if isinstance(plan, str):
            named.append(dict.fromkeys(best, "-") | {"plan": f"{name}: {plan}"})
        elif plan.choice != choice.choice:
            named.append(row(plan, ring, asked))
    shown = [plan.choice for plan in (choice, *schemes.values()) if isinstance(plan, Plan)]
    rest = [row(plan, ring, asked) for plan in others if plan.choice not in shown]
    table = table_of(title, [best, *named, *folded(rest)])
    table.rows[0].style = "bold"
    table.rows[0].end_section = table.rows[len(named)].end_section = True
    return table


def named_schemes(ring: Plan, request: Request, size: int) -> dict[str, Plan | str]:
    """The schemes that papers name, ranks in order and all heads at once; or why there is none.

    The ranks of the request may stand for all, `size`.
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
    with_teams = [(1, {"name": "concentric", "team_size": team}) for team in teams]
    return {
        "Ring Attention": ring,
        "Ulysses": best([(own, plain)] if own in degrees else [], no_ulysses),
        "USP": best(between, "no ulysses_degree between 1 and all ranks fits the heads"),
        "StarTrail": best(with_teams, no_teams),
        "all-gather": best([(1, {"name": "all_gather"})] if own > 1 else [], "one rank has all"),
    }


def row(plan: Plan, ring: Plan, asked: Request, exposed: bool = False) -> Row:
    """A plan and what is predicted of it, by the names of the columns."""
    cost = plan.cost
    hidden = {"exposed ms": milliseconds(cost.exposed_s)} if exposed else {}
    nic = {"NIC GB": f"{cost.nic_bytes / 1e9:.3g}"} if asked.topology.hosts > 1 else {}
    over = " too much" if cost.memory_bytes > asked.memory_limit else ""
    return {
        "plan": scheme(plan, asked.topology.size),
        "ms": milliseconds(cost.seconds),
        "x ring": f"{ring.cost.seconds / cost.seconds:.2f}",
        **hidden,
        **nic,
        "inside GB": f"{cost.inside_bytes / 1e9:.3g}",
        "MiB": f"{cost.memory_bytes / 2**20:.4g}{over}",
    }


def folded(rows: Sequence[Row]) -> list[Row]:
    """Rows with the same figures as one row, by the name of the first."""
    alike = dict[tuple[str, ...], list[Row]]()
    for one in rows:
        _, *figures = one.values()
        alike.setdefault(tuple(figures), []).append(one)
    return [
        first | ({"plan": f"{first['plan']} (and {len(others)} alike)"} if others else {})
        for first, *others in alike.values()
    ]
