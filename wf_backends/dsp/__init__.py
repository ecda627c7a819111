"""Dynamic sequence parallelism (DSP, arXiv 2403.10266): several sequence dimensions."""

from wf_backends.dsp.model import KEY, LAYOUT, RECEIVER, read_words, receivers, spread
from wf_backends.dsp.stages import LayoutTracker, Stages
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded

__all__ = [
    "DynamicSequenceParallel",
    "KEY",
    "LAYOUT",
    "LayoutTracker",
    "RECEIVER",
    "Sharded",
    "Stages",
    "read_words",
    "receivers",
    "spread",
]
