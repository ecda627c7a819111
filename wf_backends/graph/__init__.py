"""A model's forward pass as a graph: its operators, what may be sliced, and the memory they need.

In reading order: `capture` makes the graph; `call` and the `rules` say what a slice of an
operator's output reads of its inputs; `memory` finds the live bytes at each step.
"""

from wf_backends.graph.budget import Budget, checked_budget
from wf_backends.graph.capture import (
    Captured,
    CaptureError,
    Weight,
    bind,
    capture,
    containers,
    module_path,
    operator_name,
    refill,
    tensors,
)
from wf_backends.graph.group_norm import join_group_norms
from wf_backends.graph.memory import (
    Effect,
    Effects,
    Step,
    Steps,
    StorageTracker,
    arguments,
    profile,
    read_steps,
    submodule,
    unchunked_peak,
)
from wf_backends.graph.rules import Source, emit, granule, rule_of, sources, writes

__all__ = [
    "Budget",
    "CaptureError",
    "Captured",
    "Effect",
    "Effects",
    "Source",
    "Step",
    "Steps",
    "StorageTracker",
    "Weight",
    "arguments",
    "bind",
    "capture",
    "checked_budget",
    "containers",
    "emit",
    "granule",
    "join_group_norms",
    "module_path",
    "operator_name",
    "profile",
    "read_steps",
    "refill",
    "rule_of",
    "sources",
    "submodule",
    "tensors",
    "unchunked_peak",
    "writes",
]
