"""Which plan is the cheapest, and why. Pure: standard library only."""

from wf_backends.cost import Cost, Span, Workload
from wf_backends.planner.explanation import milliseconds, reason, scheme
from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import EXACT_UP_TO, MOVES, Choice, Plan, Request
from wf_backends.planner.proxy import (
    MIN_HALVINGS,
    SPARSE_EXACT_UP_TO,
    draw_documents,
    representative,
    with_message_counts,
)
from wf_backends.planner.published import named_schemes
from wf_backends.planner.search import all_plans, best_plan, check_memory, plan_for, price_plan

__all__ = [
    "EXACT_UP_TO",
    "MIN_HALVINGS",
    "MOVES",
    "SPARSE_EXACT_UP_TO",
    "Choice",
    "Cost",
    "Plan",
    "Request",
    "Span",
    "Workload",
    "all_plans",
    "best_plan",
    "check_memory",
    "draw_documents",
    "legal_degrees",
    "milliseconds",
    "named_schemes",
    "plan_for",
    "price_plan",
    "reason",
    "representative",
    "scheme",
    "with_message_counts",
]
