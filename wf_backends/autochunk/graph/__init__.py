"""A model's forward pass as a graph, and the memory that its operators need.

`capture` makes the graph; `memory` finds the live bytes at each step, `tracker` those of a run;
`copies` computes masks and normed inputs once for each reader; `budget` is what a user allows.
"""

from wf_backends.autochunk.graph.blocks import submodule
from wf_backends.autochunk.graph.budget import Budget, checked_budget
from wf_backends.autochunk.graph.capture import (
    Captured,
    Weight,
    capture,
    computes_itself,
    layout,
    module_path,
    nbytes,
    operator_name,
    tensors,
)
from wf_backends.autochunk.graph.copies import Copied, with_copies
from wf_backends.autochunk.graph.errors import CaptureError, as_capture_errors, no_log
from wf_backends.autochunk.graph.experts import Experts, experts_as_operators
from wf_backends.autochunk.graph.inputs import (
    bind,
    containers,
    named_weights,
    refill,
    register_containers,
    unsupported_input,
)
from wf_backends.autochunk.graph.memory import (
    Effect,
    Effects,
    GraphStep,
    Steps,
    arguments,
    profile,
    read_steps,
)
from wf_backends.autochunk.graph.tracker import (
    StorageTracker,
    fake_run,
    in_fake_run,
    planning_lock,
    unchunked_peak,
)

__all__ = [
    "Budget",
    "CaptureError",
    "Captured",
    "Copied",
    "Effect",
    "Effects",
    "Experts",
    "GraphStep",
    "Steps",
    "StorageTracker",
    "Weight",
    "arguments",
    "as_capture_errors",
    "bind",
    "capture",
    "checked_budget",
    "computes_itself",
    "containers",
    "experts_as_operators",
    "fake_run",
    "in_fake_run",
    "layout",
    "module_path",
    "named_weights",
    "nbytes",
    "no_log",
    "operator_name",
    "planning_lock",
    "profile",
    "read_steps",
    "refill",
    "register_containers",
    "submodule",
    "tensors",
    "unchunked_peak",
    "unsupported_input",
    "with_copies",
]
