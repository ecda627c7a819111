"""Exchange of channels for tokens, for layers that mix tokens in each channel, as recurrences do.

A rank gets all rows of the sequence, in order, for a share of the channels, runs the layer on them,
and returns the rows to the ranks that own them: one all-to-all before and one after the layer, in
the forward and in the backward. It is the head exchange of DeepSpeed-Ulysses (arXiv 2309.14509)
over all ranks.

Shapes: b batch, s rows of this rank, S rows of the sequence, P ranks, c channels of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends.comm import (
    NO_PASS,
    Communicator,
    ConsistencyCheck,
    all_to_all,
    fingerprint,
    sum_on_all_ranks,
)
from wf_backends.parallel.sequence_parallel import SequenceParallel
from wf_backends.runtime import linear_map, positions
from wf_backends.schedule import Layout, make_layout, size

RowMap = Callable[[Tensor, str], Tensor]
Borders = Sequence[int] | None


class ChannelExchange:
    """The exchange of channels for tokens over the ranks of one sequence."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp, self._consistency = sp, ConsistencyCheck(sp.comm)

    @eager
    def gather(self, x: Tensor, cu_seqlens: Borders = None) -> Tensor:
        """All channels of this rank's rows -> this rank's channels of all rows in sequence order.

        Args:
            x: (b, s, P, c); [:, :, r] is for rank r. Any dtype, rows in layout order.
            cu_seqlens: the packed documents, host integers; needed by document_zigzag.

        Returns:
            (b, S, c).

        Raises:
            ValueError: if the ranks' tensors do not belong together.
        """
        same = {
            "dtype": fingerprint(x.dtype),
            "batch and channels": fingerprint((len(x), *x.shape[2:])),
            "cu_seqlens": fingerprint(cu_seqlens),
        }
        lengths = self._consistency.check(same, {"rows": x.shape[1]}, x)
        gather, bring_back = self._maps(sum(lengths["rows"]), cu_seqlens)
        return linear_map(x, gather, bring_back, "channels")

    @eager
    def bring_back(self, y: Tensor, cu_seqlens: Borders = None) -> Tensor:
        """The transpose of `gather`: (b, S, c) -> (b, s, P, c)."""
        gather, bring_back = self._maps(y.shape[1], cu_seqlens)
        return linear_map(y, bring_back, gather, "channels back")

    @eager
    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; the gradient is summed over the ranks too."""
        all_reduce = partial(sum_on_all_ranks, self.sp.comm)
        return linear_map(x, all_reduce, all_reduce, "channels sum")

    def _maps(self, seqlen: int, cu_seqlens: Borders) -> tuple[RowMap, RowMap]:
        layout = make_layout(self.sp.config.layout, self.sp.size, seqlen, cu_seqlens)
        return partial(_gather, self.sp.comm, layout), partial(_bring_back, self.sp.comm, layout)


def _gather(comm: Communicator, layout: Layout, x: Tensor, label: str) -> Tensor:
    """(b, s, P, c) -> (b, S, c)."""
    comm.enter(NO_PASS)
    shapes = [torch.Size((len(x), size(shard), x.shape[3])) for shard in layout]
    whole = x.new_empty(len(x), sum(map(size, layout)), x.shape[3])
    for shard, part in zip(layout, all_to_all(comm, label, x.unbind(2), shapes), strict=True):
        whole[:, positions(shard, x.device)] = part
    return whole


def _bring_back(comm: Communicator, layout: Layout, y: Tensor, label: str) -> Tensor:
    """(b, S, c) -> (b, s, P, c)."""
    comm.enter(NO_PASS)
    parts = [y[:, positions(shard, y.device)] for shard in layout]
    shapes = [parts[comm.rank].shape] * comm.size
    return torch.stack(all_to_all(comm, label, parts, shapes), 2)
