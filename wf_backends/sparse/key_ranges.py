"""Attention of each row to consecutive keys, a block of rows at a time.

The backward computes the scores again from lse, as FlashAttention does (arXiv 2205.14135).

Shapes: b batch, s rows, h query heads, d head_dim, T keys, n rows of a block, t keys that some row
of a block sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wf_backends.runtime import accumulator_dtype, first_order_only
from wf_backends.sparse.rows import weights_of

BLOCK_SCORES = 1 << 24
"""Of all heads in a block: 64 MiB in float32."""
BLOCK_ROWS = 128
"""Of a block, or as many as a row sees keys, if these are more: it reads all its rows' keys."""


class RangesAttention(torch.autograd.Function):
    """(out (b, s, h, d) in q's dtype, lse (b, s, h)) of softmax(scale q k^T) k.

    Args:
        q: (b, s, h, d). keys: (b, T, d), of all heads, which are the values too.
        first, count: (s,) integers on the CPU: row i sees keys first[i] up to
            first[i] + count[i], exclusive.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, first: Tensor, count: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for block in _blocks(q, keys, first, count, scale):
            block_lse = block.scores.logsumexp(-1)
            weights = weights_of(block.scores, block_lse)
            out[:, block.rows] = torch.einsum("bnht,btd->bnhd", weights, block.keys)
            lse[:, block.rows] = block_lse
        ctx.save_for_backward(q, keys, out, lse)
        ctx.first, ctx.count, ctx.scale = first, count, scale
        return out, lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, out, lse = ctx.saved_tensors
        dq, dkeys = torch.empty_like(q), torch.zeros_like(keys, dtype=lse.dtype)
        # dscore = p (dp - delta), and lse adds p dlse
        delta = (dout.to(lse.dtype) * out).sum(-1) - dlse
        for block in _blocks(q, keys, ctx.first, ctx.count, ctx.scale):
            rows_of = (x[:, block.rows] for x in (dout, lse, delta))
            block_dout, block_lse, block_delta = (x.to(lse.dtype) for x in rows_of)
            p = weights_of(block.scores, block_lse)
            dp = torch.einsum("bnhd,btd->bnht", block_dout, block.keys)
            dscores = p * (dp - block_delta.unsqueeze(-1)) * ctx.scale
            dq[:, block.rows] = torch.einsum("bnht,btd->bnhd", dscores, block.keys)
            into = dkeys[:, block.columns]
            into += torch.einsum("bnht,bnhd->btd", dscores, block.queries)
            into += torch.einsum("bnht,bnhd->btd", p, block_dout)
        return dq, dkeys.to(keys.dtype), None, None, None


class _Block(NamedTuple):
    rows: slice
    columns: slice
    """The keys that some of the rows see."""
    keys: Tensor
    """(b, t, d), in the accumulator's dtype, as all below."""
    queries: Tensor
    """(b, n, h, d)"""
    scores: Tensor
    """(b, n, h, t); -inf where a row does not see a key."""


def _blocks(
    q: Tensor, keys: Tensor, first: Tensor, count: Tensor, scale: float
) -> Iterator[_Block]:
    """The rows' scores, block by block."""
    wide, num_rows = accumulator_dtype(q.dtype), q.shape[1]
    longest = max(BLOCK_ROWS, int(count.max()) if num_rows else 0)  # a block has about twice it
    size = max(1, min(longest, BLOCK_SCORES // (2 * longest * len(q) * q.shape[2])))
    stop = first + count
    limits = torch.stack((first, stop)).to(q.device)  # once: a copy for each block would wait
    for first_row in range(0, num_rows, size):
        rows = slice(first_row, min(first_row + size, num_rows))
        columns = slice(int(first[rows].min()), int(stop[rows].max()))
        some = keys[:, columns].to(wide)
        queries = q[:, rows].to(wide)
        scores = torch.einsum("bnhd,btd->bnht", queries, some) * scale
        place = torch.arange(columns.start, columns.stop, device=q.device)
        starts, stops = limits[:, rows, None]
        is_seen = (place >= starts) & (place < stops)
        scores.masked_fill_(~is_seen.unsqueeze(1), -inf)
        yield _Block(rows, columns, some, queries, scores)
