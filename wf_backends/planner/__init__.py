"""Which plan is the cheapest, and why. Pure: standard library only."""

from wf_backends.cost import Cost, Span, Workload
from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import EXACT_UP_TO, MOVES, Choice, Plan, Request, ranked
from wf_backends.planner.proxy import MIN_HALVINGS, NEAR_UP_TO, alike, counted, draw_documents
from wf_backends.planner.search import all_plans, best_plan, check_memory, plan_for, price_plan
from wf_backends.planner.words import milliseconds, reason, scheme

__all__ = [
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
    "alike",
    "all_plans",
    "best_plan",
    "check_memory",
    "counted",
    "draw_documents",
    "legal_degrees",
    "milliseconds",
    "plan_for",
    "price_plan",
    "ranked",
    "reason",
    "scheme",
]
