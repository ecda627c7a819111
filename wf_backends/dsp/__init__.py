"""Dynamic sequence parallelism (DSP, arXiv 2403.10266): several sequence dimensions."""

from wf_backends.dsp.closeness import NARROW_TOLERANCES, TOLERANCE, error_between, named_tensors
from wf_backends.dsp.first_forward import (
    RECEIVER,
    Mode,
    in_mode,
    observed_outputs,
    on_one_rank,
    receivers,
    warn,
)
from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.model import KEY, read_block, spread
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, Sizes, chunk_sizes

__all__ = [
    "DynamicSequenceParallel",
    "KEY",
    "LayoutTracker",
    "Mode",
    "NARROW_TOLERANCES",
    "RECEIVER",
    "Sharded",
    "Sizes",
    "Stages",
    "TOLERANCE",
    "chunk_sizes",
    "error_between",
    "in_mode",
    "named_tensors",
    "observed_outputs",
    "on_one_rank",
    "read_block",
    "receivers",
    "spread",
    "warn",
]
