"""Dynamic sequence parallelism (DSP, arXiv 2403.10266): several sequence dimensions."""

from wf_backends.dsp.first_forward import RECEIVER, Mode, receivers
from wf_backends.dsp.model import KEY, LAYOUT, read_words, spread
from wf_backends.dsp.stages import LayoutTracker, Stages
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, Sizes, chunk_sizes

__all__ = [
    "DynamicSequenceParallel",
    "KEY",
    "LAYOUT",
    "LayoutTracker",
    "Mode",
    "RECEIVER",
    "Sharded",
    "Sizes",
    "Stages",
    "chunk_sizes",
    "read_words",
    "receivers",
    "spread",
]
