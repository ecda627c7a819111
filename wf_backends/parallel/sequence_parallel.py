"""What a user holds: one sequence spread over the ranks of a group.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim
of queries and keys, e of values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends.cluster import JobTopology, Topology, cache_folder
from wf_backends.comm import Shared, fingerprint, make_comm, sum_over_ranks
from wf_backends.config import SequenceParallelConfig
from wf_backends.parallel.attention import AttentionOfSequence, DistributedAttention
from wf_backends.parallel.data import mask_words, prepare_batch
from wf_backends.parallel.loss import count_valid, token_loss
from wf_backends.parallel.sharding import Sharding
from wf_backends.schedule import SLICE_WORDS, padding_multiple


class SequenceParallel(AttentionOfSequence, Sharding, Shared):
    """Exact attention, batches and losses over one sequence-parallel group.

    Args:
        config: how the sequence is spread.
        group: None (the default group), a torch ProcessGroup, an mpi4py communicator, or one of
            our communicators. A group of several times `sequence_parallel_size` ranks is cut
            into blocks of consecutive ranks, one sequence each (data x sequence parallel).
        topology: hosts and links of the ranks, for what is "auto"; None = what the config's
            "topology" says.

    Raises:
        ValueError: if sequence_parallel_size does not divide the size of the group, or for a
            topology file that cannot be read.
    """

    def __init__(
        self, config: SequenceParallelConfig, group: Any = None, topology: Topology | None = None
    ) -> None:
        everyone, size = make_comm(group, config.timeout), config.sequence_parallel_size
        if everyone.size % size:
            start = f": start {size} ranks and call launch.init(), or give a group"
            raise ValueError(
                f"sequence_parallel_size must divide the {everyone.size} ranks of the group, "
                f"got {size}{start if everyone.size == 1 else ''}"
            )
        first = everyone.rank // size * size
        self.config = config
        self.comm = everyone.view(range(first, first + size))
        self.rank, self.size = self.comm.rank, size
        self.comm.watch()
        found = JobTopology(self.comm, config.topology, topology, cache_folder(os.environ))
        self._attention = DistributedAttention(config, self.comm, found)
        self._consistency = self._attention.consistency

    @eager
    def shard_batch(
        self, batch: Mapping[str, Any], pad_token_id: int = 0, labels_are_shifted: bool = False
    ) -> dict[str, Any]:
        """This rank's part of a batch that every rank holds whole.

        Args:
            batch: "input_ids" (b, S), and optionally "labels", "attention_mask", "position_ids",
                "cu_seqlens", the mask's slices and other tensors (b, S, ...); see
                `wf_backends.parallel.data.prepare_batch`.

        Returns:
            The same keys, cut along dim 1: labels shifted before the cut, position_ids added,
            everything padded to equal shards, padding labelled -100. "cu_seqlens", "q_ranges",
            "k_ranges" and "attn_mask_types" stay whole.

        Raises:
            ValueError: for a malformed batch, or one that is not the same on every rank.
        """
        with self._consistency:  # if it is refused here, it is on all ranks
            whole = prepare_batch(
                batch,
                multiple=padding_multiple(self.config.layout, self.size),
                pad_token_id=pad_token_id,
                labels_are_shifted=labels_are_shifted,
            )
        tensors = self.check_same(whole)
        words = mask_words(whole)
        return whole | {key: self.shard(x, **words) for key, x in tensors.items()}

    def check_same(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a batch, once it is known to be the same on every rank.

        Raises:
            ValueError: on every rank, naming what differs.
        """
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        same = {key: _checksum(value) for key, value in sorted(tensors.items())}
        same["cu_seqlens"] = fingerprint(batch.get("cu_seqlens"))
        same |= {key: fingerprint(batch[key]) for key in SLICE_WORDS if key in batch}
        like = next(iter(tensors.values()), torch.empty(0))
        keys = {"keys of the batch": fingerprint(sorted(same))}
        try:
            self._consistency.check(keys, {}, like, remember=False)
        except ValueError as error:
            error.add_note(f"keys of the batch on {self.comm.me}: {sorted(same)}")
            raise
        self._consistency.check(same, {}, like, remember=False)
        return tensors

    @eager
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the mean cross entropy over all valid labels of the sequence.

        The sum over the ranks is the loss of one device, and the sum of the gradients its gradient,
        however the valid labels are spread.

        Args:
            logits: (b, s, vocab). labels: (b, s), already shifted (as shard_batch gives them).

        Returns:
            A scalar: sum over local tokens / global number of valid labels, float32 or wider.

        Raises:
            ValueError: if labels do not have the shape of logits without the vocabulary.
        """
        num_valid = self.sum_over_ranks(count_valid(labels))
        return token_loss(logits, labels, num_valid)

    @eager
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a small tensor over the sequence-parallel ranks, without a gradient."""
        return sum_over_ranks(self.comm, x.detach())

    def report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last report, by hop and collective.

        Headers that check that the ranks agree, and counts of labels, are left out.
        """
        sent = {label: num_bytes for label, num_bytes in self.comm.sent.items() if num_bytes}
        self.comm.sent.clear()
        return sent


def _checksum(x: Tensor) -> int:
    return crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
