"""Which plan is the cheapest, and why. Pure: standard library only."""

from wf_backends.planner.plan import (
    BACKWARDS,
    EXACT_UP_TO,
    MOVES,
    Choice,
    Plan,
    Request,
)
from wf_backends.planner.proxy import NEAR_UP_TO, of_its_kind, on_few, on_fewer_ranks, packed
from wf_backends.planner.ranking import ranked
from wf_backends.planner.search import all_plans, best_plan, check_memory, price_again, price_plan
from wf_backends.planner.typical import MIN_HALVINGS, draw_documents
from wf_backends.planner.workload import Cost, Span, Workload

__all__ = [
    "BACKWARDS",
    "Choice",
    "Cost",
    "EXACT_UP_TO",
    "MIN_HALVINGS",
    "MOVES",
    "NEAR_UP_TO",
    "Plan",
    "Request",
    "Span",
    "Workload",
    "all_plans",
    "best_plan",
    "check_memory",
    "draw_documents",
    "of_its_kind",
    "on_few",
    "on_fewer_ranks",
    "packed",
    "price_again",
    "price_plan",
    "ranked",
]
