"""SequenceParallel: what a user calls for a sequence that is split over the ranks of a group.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim
of queries and keys, e of values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack
from zlib import crc32

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends._validation import MAX_TOKENS, positive
from wf_backends.cluster import JobTopology, Topology, cache_folder
from wf_backends.comm import GroupComm, MpiComm, Shared, fingerprint, make_comm, sum_over_ranks
from wf_backends.config import SequenceParallelConfig, checked
from wf_backends.launch import refuse_other_value
from wf_backends.parallel.attention import AttentionMethod, DistributedAttention
from wf_backends.parallel.data import mask_arguments, prepare_batch
from wf_backends.parallel.loss import count_valid, token_loss
from wf_backends.runtime import dimension, gather_shards, linear_map, positions, take_shard
from wf_backends.schedule import Layout, layout_of, make_layout, make_mask, padding_multiple


class SliceArguments(TypedDict, total=False):
    """The mask as slices, which determine the balanced layout; see `schedule.make_mask`."""

    q_ranges: Sequence[tuple[int, int]] | None
    k_ranges: Sequence[tuple[int, int]] | None
    attn_mask_types: Sequence[str] | None


class SequenceParallel(AttentionMethod, Shared):
    """Exact attention, batches and losses over one sequence-parallel group.

    Args:
        config: how the sequence is split, and by which route attention runs.
        group: None (the default group), a torch ProcessGroup, an mpi4py communicator, or one of
            our communicators. A group of n times `sequence_parallel_size` ranks is divided into
            n blocks of consecutive ranks, one sequence each (data x sequence parallel).
        topology: hosts and links of the ranks, by which "auto" is decided; None = the config's
            "topology".

    Raises:
        ValueError: if sequence_parallel_size does not divide the size of the group or is another
            one on another rank, or for a topology file that cannot be read.
    """

    def __init__(
        self, config: SequenceParallelConfig, group: Any = None, topology: Topology | None = None
    ) -> None:
        self.config = config = checked(config)
        group_comm, size = make_comm(group, config.timeout), config.sequence_parallel_size
        if group_comm.size % size:
            advice = f": start {size} ranks and call launch.init(), or give a group"
            raise ValueError(
                f"sequence_parallel_size must divide the {group_comm.size} ranks of the group, "
                f"got {size}{advice if group_comm.size == 1 else ''}"
            )
        if isinstance(group_comm, GroupComm | MpiComm):  # ranks may be threads otherwise
            ranks = group_comm.global_ranks
            refuse_other_value("sequence_parallel_size", size, ranks, group_comm.rank)
        first = group_comm.rank // size * size
        self.comm = group_comm.view(range(first, first + size))
        self.rank, self.size = self.comm.rank, size
        hosts = JobTopology(self.comm, config.topology, topology, cache_folder(os.environ))
        self._attention = DistributedAttention(config, self.comm, hosts)
        self._consistency = self._attention.consistency

    @eager
    def shard(
        self,
        x: Tensor,
        dim: int = 1,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceArguments],
    ) -> Tensor:
        """This rank's rows of a tensor that every rank holds whole, in layout order.

        The backward gathers: every rank gets the gradient of the whole tensor.

        Args:
            x: (..., S, ...), any dtype, the same on every rank.
            dim: the dimension of x that is the sequence.
            cu_seqlens: the borders of packed documents; only the document_zigzag layout needs them.
            slices: q_ranges, k_ranges and attn_mask_types as in `attention`; only the balanced
                layout needs them.

        Returns:
            (..., s, ...), a copy.

        Raises:
            ValueError: if the sequence is too short for the layout, documents or slices that the
                layout needs are missing or do not fit, or x has no such dim.
        """
        dim = dimension(x, dim)
        layout = self._layout(x.shape[dim], cu_seqlens, **slices)
        take = partial(take_shard, self.comm, layout, dim)
        gather = partial(gather_shards, self.comm, layout, dim)
        return linear_map(x, take, gather, "shard")

    @eager
    def unshard(
        self,
        x: Tensor,
        dim: int = 1,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceArguments],
    ) -> Tensor:
        """The whole tensor, in sequence order, on every rank; its gradient is split as by `shard`.

        All ranks have to use the whole tensor in the same way: a loss that every rank computes
        from it counts once, not P times.

        Args:
            x: (..., s, ...), any dtype, this rank's rows as `shard` gives them.
            dim, cu_seqlens, slices: as those of `shard`.

        Returns:
            (..., S, ...).

        Raises:
            ValueError: if the ranks' tensors are not the shards of one tensor, or have no such dim.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            dim = dimension(x, dim)
            mask = make_mask(cu_seqlens=cu_seqlens, **slices)
        other_sizes = [size for axis, size in enumerate(x.shape) if axis != dim]
        same = {"dtype": fingerprint(x.dtype), "shape beside dim": fingerprint(other_sizes)}
        # Not remembered: other ranks' rows may change in a call where this rank's do not.
        lengths = self._consistency.check(same, {"rows": x.shape[dim]}, x, remember=False)
        layout = layout_of(self.config.layout, lengths["rows"], mask, f"dim {dim} of x")
        gather = partial(gather_shards, self.comm, layout, dim)
        take = partial(take_shard, self.comm, layout, dim)
        return linear_map(x, gather, take, "unshard")

    def positions(
        self,
        seqlen: int,
        device: torch.device | None = None,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceArguments],
    ) -> Tensor:
        """(s,) int64: the global positions of this rank's rows of a sequence of `seqlen`."""
        positive("seqlen", seqlen, MAX_TOKENS)
        return positions(self._layout(seqlen, cu_seqlens, **slices)[self.rank], device)

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
            A dict with the same keys and "position_ids": tensors are this rank's rows along dim 1,
            all ranks have equally many, labels were shifted before the split and are -100 at
            padding. "cu_seqlens", "q_ranges", "k_ranges" and "attn_mask_types" stay global.
            The gradient of whole embeddings is that of this rank's rows, and 0 elsewhere: what made
            them has this rank's part of its gradient, as the model's parameters have.

        Raises:
            ValueError: for a malformed batch, or one that is not the same on every rank.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            full_batch = prepare_batch(
                batch,
                multiple=padding_multiple(self.config.layout, self.size),
                pad_token_id=pad_token_id,
                labels_are_shifted=labels_are_shifted,
            )
        tensors = self.check_same(full_batch)
        seqlen = next(iter(tensors.values())).shape[1]
        layout = self._layout(seqlen, **mask_arguments(full_batch))
        return full_batch | {k: take_shard(self.comm, layout, 1, x, k) for k, x in tensors.items()}

    @eager
    def check_same(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Check that every rank has the same batch, and return its tensors.

        Raises:
            ValueError: on every rank, naming what differs.
        """
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        same = {key: _checksum(value) for key, value in sorted(tensors.items())}
        same |= {key: fingerprint(value) for key, value in mask_arguments(batch).items()}
        on_device = next(iter(tensors.values())) if tensors else torch.empty(0)
        names = {"keys of the batch": sorted(same)}
        keys = {name: fingerprint(keys) for name, keys in names.items()}
        self._consistency.check(keys, {}, on_device, remember=False, objects=names)
        self._consistency.check(same, {}, on_device, remember=False)
        return tensors

    @eager
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the mean cross entropy over all valid labels of the sequence.

        The sum of the ranks' losses is the loss of one device, and the sum of their gradients is
        its gradient, also if the ranks have different numbers of valid labels.

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

        Headers that compare arguments between ranks, and counts of labels, are not counted.
        """
        sent = {label: num_bytes for label, num_bytes in self.comm.sent.items() if num_bytes}
        self.comm.sent.clear()
        return sent

    def _layout(
        self,
        seqlen: int,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceArguments],
    ) -> Layout:
        mask = make_mask(cu_seqlens=cu_seqlens, seqlen=seqlen, **slices)
        return make_layout(self.config.layout, self.size, seqlen, mask.cu_seqlens, mask.slices)


def _checksum(x: Tensor) -> int:
    """The CRC-32 of the elements of x, read on the host."""
    x = x.detach().cpu().contiguous()
    return crc32(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
