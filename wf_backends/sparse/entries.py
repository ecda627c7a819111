"""Attention of rows to all entries up to them, a block of rows at a time.

The backward computes the scores again from lse, as FlashAttention does (arXiv 2205.14135).

Shapes: b batch, s rows, h query heads, d head_dim, T entries, n rows of a block, t entries that
some row of a block sees.
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


class EntriesAttention(torch.autograd.Function):
    """(out (b, s, h, d) in q's dtype, lse (b, s, h)) of softmax(scale q e^T) e.

    Args:
        q: (b, s, h, d). entries: (b, T, d), keys and values of all heads.
        first, count: (s,) integers on the CPU: row i sees entries first[i] to first[i] + count[i].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, entries: Tensor, first: Tensor, count: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for block in _blocks(q, entries, first, count, scale):
            block_lse = block.scores.logsumexp(-1)
            weights = weights_of(block.scores, block_lse)
            out[:, block.rows] = torch.einsum("bnht,btd->bnhd", weights, block.entries)
            lse[:, block.rows] = block_lse
        ctx.save_for_backward(q, entries, out, lse)
        ctx.first, ctx.count, ctx.scale = first, count, scale
        return out, lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, entries, out, lse = ctx.saved_tensors
        dq, dentries = torch.empty_like(q), torch.zeros_like(entries, dtype=lse.dtype)
        # dscore = p (dp - delta), and lse adds p dlse
        delta = (dout.to(lse.dtype) * out).sum(-1) - dlse
        for block in _blocks(q, entries, ctx.first, ctx.count, ctx.scale):
            rows_of = (x[:, block.rows] for x in (dout, lse, delta))
            block_dout, block_lse, block_delta = (x.to(lse.dtype) for x in rows_of)
            p = weights_of(block.scores, block_lse)
            dp = torch.einsum("bnhd,btd->bnht", block_dout, block.entries)
            dscores = p * (dp - block_delta.unsqueeze(-1)) * ctx.scale
            dq[:, block.rows] = torch.einsum("bnht,btd->bnhd", dscores, block.entries)
            into = dentries[:, block.columns]
            into += torch.einsum("bnht,bnhd->btd", dscores, block.queries)
            into += torch.einsum("bnht,bnhd->btd", p, block_dout)
        return dq, dentries.to(entries.dtype), None, None, None


class _Block(NamedTuple):
    rows: slice
    columns: slice
    """The entries that some of the rows see."""
    entries: Tensor
    """(b, t, d), in the accumulator's dtype, as all below."""
    queries: Tensor
    """(b, n, h, d)"""
    scores: Tensor
    """(b, n, h, t); -inf where a row does not see an entry."""


def _blocks(
    q: Tensor, entries: Tensor, first: Tensor, count: Tensor, scale: float
) -> Iterator[_Block]:
    """The rows' scores, block by block."""
    wide, size = accumulator_dtype(q.dtype), max(1, len(q) * q.shape[2] * entries.shape[1])
    for rows in torch.arange(q.shape[1]).split(max(1, BLOCK_SCORES // size)):
        rows = slice(int(rows[0]), int(rows[-1]) + 1)
        start, stop = first[rows], first[rows] + count[rows]
        columns = slice(int(start.min()), int(stop.max()))
        some = entries[:, columns].to(wide)
        queries = q[:, rows].to(wide)
        scores = torch.einsum("bnhd,btd->bnht", queries, some) * scale
        place = torch.arange(columns.start, columns.stop)
        is_seen = (place >= start.unsqueeze(-1)) & (place < stop.unsqueeze(-1))
        scores.masked_fill_(~is_seen.unsqueeze(1).to(q.device), -inf)
        yield _Block(rows, columns, some, queries, scores)
