"""What a pass of attention costs: seconds, bytes and memory. Pure: standard library only."""

from wf_backends.cost.closed_form import ClosedForm
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.route_shape import RouteShape, shape_of
from wf_backends.cost.ulysses import ulysses_cost
from wf_backends.cost.workload import (
    BACKWARD_KEYS,
    FORWARD,
    Cost,
    HeadSplit,
    PassKind,
    Span,
    Workload,
)

__all__ = [
    "BACKWARD_KEYS",
    "FORWARD",
    "ClosedForm",
    "Cost",
    "HeadSplit",
    "PassKind",
    "RouteShape",
    "Span",
    "Workload",
    "pass_cost",
    "shape_of",
    "ulysses_cost",
]
