"""What a rank's memory holds in a training step. Pure: standard library only."""

from wf_backends.budget.activations import Activations, MemoryOptions
from wf_backends.budget.budget import Training
from wf_backends.budget.model import Decoder, Experts, Layer
from wf_backends.budget.report import gib, report, tables
from wf_backends.budget.states import STAGES, Buckets, States

__all__ = [
    "Activations",
    "Buckets",
    "Decoder",
    "Experts",
    "Layer",
    "MemoryOptions",
    "STAGES",
    "States",
    "Training",
    "gib",
    "report",
    "tables",
]
