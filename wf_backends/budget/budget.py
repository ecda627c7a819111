"""A rank's memory in a training step, and the longest sequence that fits it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from wf_backends._validation import MAX_TOKENS
from wf_backends.budget.activations import Activations, MemoryOptions, activations
from wf_backends.budget.model import Decoder
from wf_backends.budget.states import Buckets, States, states


@dataclass(frozen=True, slots=True)
class Training:
    """A training job: the model, its ranks, and how they share sequences."""

    model: Decoder
    sequence_parallel_size: int
    """Ranks that share a sequence."""
    attention_bytes: float
    """Bytes of an attention layer's buffers for each token of the rank, as the planner counts."""
    batch: int = 1
    """Sequences that a sequence-parallel group computes at a time."""
    data_parallel_size: int = 1
    """Sequence-parallel groups, each with other sequences."""
    buckets: Buckets = Buckets()

    def tokens(self, seqlen: int) -> int:
        """Tokens of a rank, of all samples of its batch."""
        return self.batch * -(-seqlen // self.sequence_parallel_size)

    def states(self, stage: int) -> States:
        """Parameters, gradients and optimizer states of a rank; `stage` is one of STAGES."""
        ranks = self.sequence_parallel_size * self.data_parallel_size
        return states(self.model, stage, ranks, self.buckets)

    def activations(self, seqlen: int, options: MemoryOptions) -> Activations:
        """Activations of a rank for a sequence of `seqlen` tokens."""
        tokens = self.tokens(seqlen)
        return activations(self.model, tokens, self.attention_bytes * tokens, options)

    def device_bytes(self, seqlen: int, stage: int, options: MemoryOptions) -> float:
        """The peak of a rank's device memory in a step."""
        return self.states(stage).peak(self.activations(seqlen, options).peak)

    def longest(self, memory_bytes: float, stage: int, options: MemoryOptions) -> int:
        """The longest sequence whose step fits, in tokens, a multiple of the ranks; 0 if none."""
        ranks = self.sequence_parallel_size

        def is_too_long(tokens_per_rank: int) -> bool:
            return self.device_bytes(tokens_per_rank * ranks, stage, options) > memory_bytes

        return bisect_left(range(1, MAX_TOKENS), True, key=is_too_long) * ranks
