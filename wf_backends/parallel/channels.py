"""Exchange of channels for tokens, for layers that mix tokens in each channel, as recurrences do.

A rank gets all rows of the sequence, in order, for a share of the channels, runs the layer on them,
and returns the rows to the ranks that own them: one all-to-all before and one after the layer, in
the forward and in the backward. It is the head exchange of DeepSpeed-Ulysses (arXiv 2309.14509)
over all ranks.

Shapes: b batch, s rows of this rank, S rows of the sequence, P ranks, c channels of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from wf_backends._compile import eager
from wf_backends.comm import ConsistencyCheck, fingerprint, sum_on_all_ranks
from wf_backends.parallel.sequence_parallel import SequenceParallel
from wf_backends.runtime import (
    HeadExchange,
    heads_for_tokens,
    linear_map,
    make_head_exchange,
    tokens_for_heads,
)
from wf_backends.schedule import make_layout

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
        exchange = self._exchange(sum(lengths["rows"]), cu_seqlens)
        return heads_for_tokens(x, exchange, self.sp.comm, "channels").squeeze(2)

    @eager
    def bring_back(self, y: Tensor, cu_seqlens: Borders = None) -> Tensor:
        """The transpose of `gather`: (b, S, c) -> (b, s, P, c)."""
        exchange = self._exchange(y.shape[1], cu_seqlens)
        return tokens_for_heads(y.unsqueeze(2), exchange, self.sp.comm, "channels back")

    @eager
    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; the gradient is summed over the ranks too."""
        all_reduce = partial(sum_on_all_ranks, self.sp.comm)
        return linear_map(x, all_reduce, all_reduce, "channels sum")

    def _exchange(self, seqlen: int, cu_seqlens: Borders) -> HeadExchange:
        size = self.sp.size
        layout = make_layout(self.sp.config.layout, size, seqlen, cu_seqlens)
        return make_head_exchange(layout, size, size)
