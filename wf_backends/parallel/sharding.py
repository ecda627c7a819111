"""Splits whole tensors into the shards of the ranks, and gathers shards into whole tensors.

Shapes: s local seqlen, S global seqlen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends._validation import MAX_TOKENS, positive
from wf_backends.comm import Communicator, ConsistencyCheck, fingerprint
from wf_backends.config import SequenceParallelConfig
from wf_backends.runtime import dimension, gather_shards, linear_map, positions, take_shard
from wf_backends.schedule import Layout, layout_of, make_layout, make_mask


class SliceArguments(TypedDict, total=False):
    """The mask as slices, which determine the balanced layout; see `schedule.make_mask`."""

    q_ranges: Sequence[tuple[int, int]] | None
    k_ranges: Sequence[tuple[int, int]] | None
    attn_mask_types: Sequence[str] | None


class Sharding:
    """The methods of `SequenceParallel` that split and gather tensors."""

    config: SequenceParallelConfig
    comm: Communicator
    rank: int
    size: int
    _consistency: ConsistencyCheck

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

    def _layout(
        self,
        seqlen: int,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceArguments],
    ) -> Layout:
        mask = make_mask(cu_seqlens=cu_seqlens, seqlen=seqlen, **slices)
        return make_layout(self.config.layout, self.size, seqlen, mask.cu_seqlens, mask.slices)
