"""What tests of costs share: a shape, the four kinds of passes, and placed routes."""

from __future__ import annotations

from typing import Any

from wf_backends.cost.workload import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, PassKind
from wf_backends.lowering.message_bytes import Shape
from wf_backends.schedule.placement import Placed, default_placement

SHAPE = Shape(batch=1, heads=8, kv_heads=4, head_dim=16, itemsize=2)
FORWARD_QUERIES = PassKind("forward", queries_walk=True)
KINDS = (FORWARD, FORWARD_QUERIES, BACKWARD_KEYS, BACKWARD_QUERIES)


def kind_id(kind: PassKind) -> str:
    return f"{kind.name}, {'queries' if kind.queries_walk else 'keys'} walk"


def route(n: int, **keys: Any) -> Placed:
    """A route of n ranks in rank order, from the keys of its block in a config."""
    return default_placement(keys, n)
