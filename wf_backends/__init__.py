"""WallFacer: exact attention over sequences that are spread over many ranks."""

from wf_backends import launch
from wf_backends.parallel import SequenceParallel, SequenceParallelConfig

__all__ = ["SequenceParallel", "SequenceParallelConfig", "launch"]
