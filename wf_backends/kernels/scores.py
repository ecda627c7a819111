"""How the scores of a tile follow from q k^T, and which softmax weights are dropped.

Shapes: b batch, i query rows, j key rows, h query heads, n distances of a learned bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wf_backends.kernels.dropout import Dropout
from wf_backends.schedule import Range


class PositionBias:
    """A learned bias that depends on the distance of row and key; it collects its gradient.

        bias(head, i, j) = table[head, n - 1 + clamp(j - i, 1 - n, n - 1)]

    Args:
        table: (h, 2 n - 1), for the query heads that are computed.

    Source: T5 (arXiv 1910.10683, section 2.1). Its buckets are such a table: from a maximum
    distance on, all distances share one bucket.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._sum_dtype = torch.promote_types(table.dtype, torch.float32)
        self._grad: Tensor | None = None

    def lookup(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(h, i, j): the bias for rows (i,) and keys (j,), int64 global positions."""
        return self._table[:, self._index(rows, keys)]

    def add_grad(self, grad: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Add grad (h, i, j), the gradient of lookup(rows, keys), to the table's gradient."""
        if self._grad is None:
            self._grad = torch.zeros_like(self._table, dtype=self._sum_dtype)
        index = self._index(rows, keys).flatten()
        self._grad.index_add_(1, index, grad.flatten(1).to(self._sum_dtype))

    def grad(self) -> Tensor:
        """(h, 2 n - 1), the table's dtype: the table's gradient from all tiles so far."""
        total = torch.zeros_like(self._table) if self._grad is None else self._grad
        return total.to(self._table.dtype)

    def _index(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(i, j) int64: the column of the table for each pair."""
        max_distance = self._table.shape[1] // 2
        return (keys - rows[:, None]).clamp(-max_distance, max_distance) + max_distance


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How scores follow from q k^T (without the mask), and the dropout of their softmax.

        x = scale q k^T
        x' = softcap tanh(x / softcap)                (softcap 0: x' = x)
        score = x' - slopes |position of row - position of key| + bias(head, row, key)
        weight = dropout(softmax(score))

    Source: soft cap as in Gemma 2 (arXiv 2408.00118, section 2); ALiBi (arXiv 2108.12409),
    symmetric as in flash-attn.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi slopes (h,) of the query heads that are computed; None = no ALiBi."""
    dropout: Dropout | None = None
    bias: PositionBias | None = None
    """Set by the runtime for the heads that are computed, after `of_heads`."""
    rows: Tensor | None = None
    """(i,) int64: the rows' global positions; needed by slopes, dropout and bias only."""
    keys: Tensor | None = None
    """(j,) int64: the keys' global positions."""

    def at_positions(self, rows: Tensor, keys: Tensor) -> Scores:
        """The scores of a tile whose rows (i,) and keys (j,) have these global positions."""
        return replace(self, rows=rows, keys=keys)

    def part(self, rows: slice, keys: slice) -> Scores:
        """The scores of some rows and keys of this tile."""
        if self.rows is None or self.keys is None:
            return self
        return self.at_positions(self.rows[rows], self.keys[keys])

    def of_heads(self, heads: Range) -> Scores:
        """The scores of some query heads: `heads` (start, stop) counts from the first one."""
        slopes = None if self.slopes is None else self.slopes[slice(*heads)]
        dropout = None if self.dropout is None else self.dropout.of_heads(heads)
        return replace(self, slopes=slopes, dropout=dropout)
