"""Attention of rows to chosen rows of a table of keys and values, a block of rows at a time.

A block reads the keys and values that its rows chose, and holds them and the scores. The backward
computes the scores again from lse, as FlashAttention does (arXiv 2205.14135).

Shapes: b batch, s rows, S rows of the table, h query heads, g key heads, m = h / g, t chosen keys,
d head_dim, e of values, w numbers of a row of the table, n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wf_backends.parallel import Softmax
from wf_backends.runtime import accumulator_dtype, first_order_only, with_sinks

BLOCK_ELEMENTS = 1 << 24
"""Of the keys and values that a block reads: 64 MiB in float32."""


class Columns(NamedTuple):
    """Which numbers of a row of the table are its key, and which its value; they may overlap."""

    key: slice
    value: slice


def add_sinks(out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    """out (b, s, h, e) with the sinks of `softmax`, if it has any; lse (b, s, h)."""
    if softmax.learned.sinks is None:
        return out
    rows_first = out.transpose(0, 1), lse.transpose(0, 1)
    merged, _ = with_sinks(*rows_first, softmax.learned.sinks)
    return merged.transpose(0, 1)


class RowsAttention(torch.autograd.Function):
    """(out (b, s, h, e) in q's dtype, lse (b, s, h)) of softmax(scale q k^T) v.

    Args:
        q: (b, s, h, d). table: (b, S, g, w).
        chosen: (b, s, g or 1, t) integers: rows of the table; -1 = none.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, table: Tensor, chosen: Tensor, scale: float, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        table = table.contiguous()
        value_dim = table[..., columns.value].shape[-1]
        out = q.new_empty(*q.shape[:3], value_dim)
        lse = q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for block in _blocks(q, table, chosen, scale, columns):
            block_lse = block.scores.logsumexp(-1)
            weights = weights_of(block.scores, block_lse)
            out[:, block.rows] = (weights @ block.values).flatten(2, 3)
            lse[:, block.rows] = block_lse.flatten(2)
        ctx.save_for_backward(q, table, chosen, out, lse)
        ctx.scale, ctx.columns = scale, columns
        return out, lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, table, chosen, out, lse = ctx.saved_tensors
        columns, heads, wide = ctx.columns, table.shape[2], lse.dtype
        dq, dtable = torch.empty_like(q), torch.zeros_like(table, dtype=wide)
        dtable_rows = dtable.view(-1, table.shape[-1])
        # dscore = p (dp - delta), and lse adds p dlse
        delta = (dout.to(wide) * out).sum(-1) - dlse
        for block in _blocks(q, table, chosen, ctx.scale, columns):
            rows_of = (x[:, block.rows].unflatten(2, (heads, -1)) for x in (dout, lse, delta))
            block_dout, block_lse, block_delta = (x.to(wide) for x in rows_of)
            p = weights_of(block.scores, block_lse)
            dscores = p * (block_dout @ block.values.mT - block_delta.unsqueeze(-1))
            dscores *= ctx.scale
            dq[:, block.rows] = (dscores @ block.keys).flatten(2, 3)
            dread = torch.zeros_like(block.read)
            dread[..., columns.key] += dscores.mT @ block.queries
            dread[..., columns.value] += p.mT @ block_dout
            dtable_rows.index_add_(0, block.index, dread.flatten(0, -2))
        return dq, dtable.to(table.dtype), None, None, None


class _Block(NamedTuple):
    rows: slice
    index: Tensor
    """(b n g t,): rows of the table (b S g, w)."""
    read: Tensor
    """(b, n, g, t, w), in the accumulator's dtype, as all below."""
    keys: Tensor
    values: Tensor
    queries: Tensor
    """(b, n, g, m, d)"""
    scores: Tensor
    """(b, n, g, m, t); -inf where there is no key."""


def _blocks(
    q: Tensor, table: Tensor, chosen: Tensor, scale: float, columns: Columns
) -> Iterator[_Block]:
    """The rows' scores, block by block."""
    samples, length, heads, width = table.shape
    num_rows, num_chosen, wide = q.shape[1], chosen.shape[3], accumulator_dtype(q.dtype)
    samples_and_heads = torch.arange(samples * heads, device=q.device).view(samples, 1, heads, 1)
    first_rows = (samples_and_heads // heads) * length * heads + samples_and_heads % heads
    size = max(1, BLOCK_ELEMENTS // max(1, samples * heads * num_chosen * width))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        block_chosen = chosen[:, rows].long()
        index = (first_rows + block_chosen.clamp(min=0) * heads).flatten()
        read = table.view(-1, width).index_select(0, index).to(wide)
        read = read.view(*block_chosen.shape[:2], heads, num_chosen, width)
        keys, values = read[..., columns.key], read[..., columns.value]
        queries = q[:, rows].unflatten(2, (heads, -1)).to(wide)
        scores = (queries @ keys.mT).mul_(scale)
        scores.masked_fill_((block_chosen < 0).unsqueeze(3), -inf)
        yield _Block(rows, index, read, keys, values, queries, scores)


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse): the softmax of the scores; 0 in rows without keys."""
    return torch.exp(scores - lse.masked_fill(lse == -inf, 0.0).unsqueeze(-1))
