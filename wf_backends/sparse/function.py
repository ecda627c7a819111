"""Attention of rows to what readers read for them, a block of rows at a time.

A block has all keys of its rows, and their scores, in float32 for half precisions: one softmax runs
over all readers' keys and the sinks, and each result is rounded once. The backward computes the
scores again from lse, as FlashAttention does (arXiv 2205.14135).

Shapes: b batch, s rows, h query heads, d head_dim, e of values, n rows of a block, w numbers of a
row of a table, t keys. A reader reads (b, N, g, t, w): t keys for each of N g groups of queries,
which have M = n h / (N g) queries each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wf_backends.runtime import accumulator_dtype, first_order_only, sinks_grad


class Columns(NamedTuple):
    """Which numbers of a row of a table are its key, and which its value; they may overlap."""

    key: slice
    value: slice


BOTH = Columns(slice(None), slice(None))
"""Keys that are the values too."""


class Read(NamedTuple):
    """What a reader gives for a block of rows."""

    rows: Tensor
    """(b, N, g, t, w), rows of the table, in the accumulator's dtype."""
    hidden: Tensor
    """bool, of scores as (b, n, x, h / x, t), with x as here: which keys a row does not see."""
    add_grad: Callable[[Tensor, Tensor], None]
    """Add a gradient of `rows` to the gradient of the table."""


class Reader(Protocol):
    """Reads what blocks of rows see."""

    columns: Columns
    block_rows: int
    """The most rows of a block."""

    def read(self, rows: slice) -> Read: ...


MakeReader = Callable[[Tensor, Tensor, torch.Size], Reader]
"""Of a table, integers that say which of its rows are seen, and the shape of q."""


class KeysAttention(torch.autograd.Function):
    """(b, s, h, e), q's dtype: softmax(scale q k^T) v over all readers' keys and the sinks; 0 in
    rows without keys.

    Args:
        q: (b, s, h, d). sinks: (h,) or None.
        tables: of each reader its table and its integers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        sinks: Tensor | None,
        scale: float,
        make: Sequence[MakeReader],
        *tables: Tensor,
    ) -> Tensor:
        readers = _readers(make, tables, q)
        value_dim = tables[0][..., readers[0].columns.value].shape[-1]
        out = q.new_empty(*q.shape[:3], value_dim)
        lse = q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for rows in _blocks(readers, q):
            parts = (_Part(x, q[:, rows], rows, scale) for x in readers)
            out[:, rows], lse[:, rows] = _attend([*parts], sinks)
        ctx.save_for_backward(q, sinks, lse, *tables)
        ctx.scale, ctx.make = scale, make
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, sinks, lse, *tables = ctx.saved_tensors
        readers = _readers(ctx.make, tables, q)
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        grads = [torch.zeros_like(table, dtype=lse.dtype) for table in tables[::2]]
        for rows in _blocks(readers, q):
            parts = (_Part(x, q[:, rows], rows, ctx.scale) for x in readers)
            of_rows = dout[:, rows], lse[:, rows]
            dq[:, rows], delta[:, rows] = _differentiate([*parts], *of_rows, grads)
        dtables = (x.to(table.dtype) for x, table in zip(grads, tables[::2], strict=True))
        dsinks = None if sinks is None else sinks_grad(sinks, lse.transpose(0, 1), delta)
        return dq, dsinks, None, None, *(x for dtable in dtables for x in (dtable, None))


class _Part:
    """What one reader reads for a block of rows, and the scores."""

    def __init__(self, reader: Reader, q: Tensor, rows: slice, scale: float) -> None:
        self._read, self._scale, self._shape = reader.read(rows), scale, q.shape[:3]
        self._columns = reader.columns
        self._keys, self._values = (self._read.rows[..., x] for x in reader.columns)
        self._queries = self._fold(q)
        self._scores = (self._queries @ self._keys.mT).mul_(scale)  # b N g M t
        hidden, (batch, num_rows, num_heads, _) = self._read.hidden, q.shape
        shape = batch, num_rows, hidden.shape[2], num_heads // hidden.shape[2], hidden.shape[-1]
        self._scores.view(shape).masked_fill_(hidden, -inf)

    def lse(self) -> Tensor:
        """(b, n, h)"""
        return self._unfold(self._scores.logsumexp(-1))

    def out(self, lse: Tensor) -> Tensor:
        """(b, n, h, e), of these keys; lse (b, n, h) of all."""
        return self._unfold(self._weights(lse) @ self._values)

    def start_backward(self, dout: Tensor, lse: Tensor) -> Tensor:
        """(b, n, h): sum of p dp over these keys; over all keys it is rowsum(dout * out)."""
        self._dout, self._p = self._fold(dout), self._weights(lse)
        self._dp = self._dout @ self._values.mT
        return self._unfold((self._p * self._dp).sum(-1))

    def finish_backward(self, delta: Tensor, dtable: Tensor) -> Tensor:
        """dq (b, n, h, d), of these keys; adds to the gradient of the table. delta (b, n, h)."""
        dscores = self._dp.sub_(self._fold(delta.unsqueeze(-1))).mul_(self._p).mul_(self._scale)
        drows = torch.zeros_like(self._read.rows)
        drows[..., self._columns.key] += dscores.mT @ self._queries
        drows[..., self._columns.value] += self._p.mT @ self._dout
        self._read.add_grad(dtable, drows)
        return self._unfold(dscores @ self._keys)

    def _weights(self, lse: Tensor) -> Tensor:
        """The softmax of the scores, in their place."""
        return self._scores.sub_(self._fold(lse.unsqueeze(-1))).exp_()

    def _fold(self, x: Tensor) -> Tensor:
        """(b, n, h, ...) -> (b, N, g, M, ...), in the accumulator's dtype."""
        rows = self._read.rows
        _, blocks, key_heads, *_ = rows.shape
        members = x.shape[1] * x.shape[2] // (blocks * key_heads)  # M; a batch may be empty
        return x.to(rows.dtype).reshape(*rows.shape[:3], members, x.shape[-1])

    def _unfold(self, x: Tensor) -> Tensor:
        return x.reshape(*self._shape, *x.shape[4:])


def _attend(parts: Sequence[_Part], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (b, n, h, e), and lse (b, n, h), or 0 in rows without keys and sinks: weights of 0."""
    lse = reduce(torch.logaddexp, [x.lse() for x in parts])
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    lse = lse.masked_fill(lse == -inf, 0.0)
    return reduce(torch.add, [x.out(lse) for x in parts]), lse


def _differentiate(
    parts: Sequence[_Part], dout: Tensor, lse: Tensor, dtables: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """dq (b, n, h, d), and rowsum(dout * out) (b, n, h); adds to the gradients of the tables."""
    delta = reduce(torch.add, [x.start_backward(dout, lse) for x in parts])
    pairs = zip(parts, dtables, strict=True)
    return reduce(torch.add, [x.finish_backward(delta, dtable) for x, dtable in pairs]), delta


def _readers(make: Sequence[MakeReader], tables: Sequence[Tensor], q: Tensor) -> list[Reader]:
    pairs = zip(make, tables[::2], tables[1::2], strict=True)
    return [make_one(table, integers, q.shape) for make_one, table, integers in pairs]


def _blocks(readers: Sequence[Reader], q: Tensor) -> Iterator[slice]:
    size = max(1, min(x.block_rows for x in readers))
    for start in range(0, q.shape[1], size):
        yield slice(start, min(start + size, q.shape[1]))
