"""The tables of `wallfacer plan`: one of 80 columns, and one of all plans with all figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from wf_backends.cli.tables import table_of
from wf_backends.planner import Plan, Request, milliseconds, named_schemes, scheme

Row = dict[str, str]


def full_table(plans: Sequence[Plan], ring: Plan, asked: Request, title: str) -> Table:
    """All plans in their order with all figures, and the ring with which they are compared."""
    is_listed = ring.choice in [plan.choice for plan in plans]
    listed = [*plans] if is_listed else [*plans, ring]
    return table_of(title, [row(plan, ring, asked, exposed=True) for plan in listed])


def short_table(
    plans: Sequence[Plan], ring: Plan, request: Request, asked: Request, title: str
) -> Table:
    """The best plan, the named schemes, then the other plans.

    Args:
        plans: the best first. ring: the plain ring.
        request: what was priced; its ranks may stand for all. asked: the request for all ranks.
    """
    best_plan, *others = plans
    best = row(best_plan, ring, asked)
    schemes = named_schemes(ring, request, asked.topology.size)
    named = list[Row]()
    for name, plan in schemes.items():
        if isinstance(plan, str):
            named.append(dict.fromkeys(best, "-") | {"plan": f"{name}: {plan}"})
        elif plan.choice != best_plan.choice:
            named.append(row(plan, ring, asked))
    listed = [plan.choice for plan in (best_plan, *schemes.values()) if isinstance(plan, Plan)]
    rest = [row(plan, ring, asked) for plan in others if plan.choice not in listed]
    table = table_of(title, [best, *named, *merge_equal(rest)])
    table.rows[0].style = "bold"
    table.rows[0].end_section = table.rows[len(named)].end_section = True
    return table


def row(plan: Plan, ring: Plan, asked: Request, exposed: bool = False) -> Row:
    """A plan and its predicted figures, by the names of the columns."""
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


def merge_equal(rows: Sequence[Row]) -> list[Row]:
    """Rows with equal figures become one row, with the name of the first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for plan_row in rows:
        _, *figures = plan_row.values()
        groups.setdefault(tuple(figures), []).append(plan_row)
    return [
        first | ({"plan": f"{first['plan']} (and {len(others)} alike)"} if others else {})
        for first, *others in groups.values()
    ]
