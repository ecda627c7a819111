"""Whole tensors cut into the rows of each rank, and put together again.

Shapes: s local seqlen, S global seqlen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends.comm import Communicator, ConsistencyCheck, fingerprint
from wf_backends.config import SequenceParallelConfig
from wf_backends.runtime import dimension, gather_shards, move, positions, take_shard
from wf_backends.schedule import Layout, layout_of, make_layout, make_mask


class SliceWords(TypedDict, total=False):
    """The mask as slices, from which the balanced layout follows; see `schedule.make_mask`."""

    q_ranges: Sequence[tuple[int, int]] | None
    k_ranges: Sequence[tuple[int, int]] | None
    attn_mask_types: Sequence[str] | None


class Sharding:
    """What of a sequence is a rank's own."""

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
        **slices: Unpack[SliceWords],
    ) -> Tensor:
        """This rank's rows of a tensor that every rank holds whole, in layout order.

        The gradient is gathered: every rank gets that of the whole tensor.

        Args:
            x: (..., S, ...), any dtype, the same on every rank.
            dim: which dimension of x the sequence is.
            cu_seqlens: the packed documents; needed by the document_zigzag layout alone.
            slices: q_ranges, k_ranges and attn_mask_types as attention takes them; needed by the
                balanced layout alone.

        Returns:
            (..., s, ...), a copy.

        Raises:
            ValueError: if the sequence is too short for the layout, what the layout follows from
                is missing or does not fit, or x has no such dim.
        """
        dim = dimension(x, dim)
        layout = self._layout(x.shape[dim], cu_seqlens, slices)
        there, back = (partial(f, self.comm, layout, dim) for f in (take_shard, gather_shards))
        return move(x, there, back, "shard")

    @eager
    def unshard(
        self,
        x: Tensor,
        dim: int = 1,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceWords],
    ) -> Tensor:
        """The whole tensor, in sequence order, on every rank; its gradient is cut by `shard`.

        Every rank is taken to use the whole tensor in the same way: a loss that all ranks compute
        from it counts once, not once a rank.

        Args:
            x: (..., s, ...), any dtype, this rank's rows as `shard` gives them.
            dim, cu_seqlens, slices: as those of `shard`.

        Returns:
            (..., S, ...).

        Raises:
            ValueError: if the ranks' tensors are not the shards of one tensor, or have no such dim.
        """
        with self._consistency:  # if it is refused here, it is on all ranks
            dim, mask = dimension(x, dim), make_mask(cu_seqlens=cu_seqlens, **slices)
        others = [n for axis, n in enumerate(x.shape) if axis != dim]
        same = {"dtype": fingerprint(x.dtype), "shape beside dim": fingerprint(others)}
        told = self._consistency.check(same, {"rows": x.shape[dim]}, x, remember=False)
        rows = told["rows"]  # of others they may have changed where this rank's are the same
        layout = layout_of(self.config.layout, rows, mask, f"dim {dim} of x")
        there, back = (partial(f, self.comm, layout, dim) for f in (gather_shards, take_shard))
        return move(x, there, back, "unshard")

    def positions(
        self,
        seqlen: int,
        device: torch.device | None = None,
        cu_seqlens: Sequence[int] | None = None,
        **slices: Unpack[SliceWords],
    ) -> Tensor:
        """(s,) int64: the global positions of this rank's rows of a sequence of `seqlen`."""
        return positions(self._layout(seqlen, cu_seqlens, slices)[self.rank], device)

    def _layout(self, seqlen: int, cu_seqlens: Sequence[int] | None, words: SliceWords) -> Layout:
        mask = make_mask(cu_seqlens=cu_seqlens, seqlen=seqlen, **words)
        return make_layout(self.config.layout, self.size, seqlen, mask.cu_seqlens, mask.slices)
