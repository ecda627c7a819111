"""How a tile's scores follow from q k^T, and which of their weights are dropped.

Shapes: b batch, i query rows, j key rows, h query heads, n distances of a learned bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wf_backends.kernels.dropout import Dropout
from wf_backends.schedule import Range


class PositionBias:
    """A learned bias of the scores by the distance of row and key, and its gradient.

        bias(head, i, j) = table[head, n - 1 + clamp(j - i, 1 - n, n - 1)]

    Args:
        table: (h, 2 n - 1), of the heads at hand.

    Source: T5 (arXiv 1910.10683, section 2.1), whose buckets are such a table: beyond a distance
    they are all one.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._wide = torch.promote_types(table.dtype, torch.float32)
        self._grad: Tensor | None = None

    def of(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(h, i, j), of rows and keys at these positions."""
        return self._table[:, self._index(rows, keys)]

    def add_grad(self, grad: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take (h, i, j), the gradient of what `of` gave."""
        if self._grad is None:
            self._grad = torch.zeros_like(self._table, dtype=self._wide)
        index = self._index(rows, keys).flatten()
        self._grad.index_add_(1, index, grad.flatten(1).to(self._wide))

    def grad(self) -> Tensor:
        """(h, 2 n - 1), the table's dtype: its gradient in all tiles so far."""
        found = torch.zeros_like(self._table) if self._grad is None else self._grad
        return found.to(self._table.dtype)

    def _index(self, rows: Tensor, keys: Tensor) -> Tensor:
        farthest = self._table.shape[1] // 2
        return (keys - rows[:, None]).clamp(-farthest, farthest) + farthest


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What softmax is taken of, beside the mask.

        x = scale q k^T
        x' = softcap tanh(x / softcap)                (softcap 0: x' = x)
        score = x' - slopes |position of row - position of key| + bias(head, row, key)

    and what is dropped of the weights softmax(score) before they meet the values.

    Source: soft cap as in Gemma 2 (arXiv 2408.00118, section 2); ALiBi (arXiv 2108.12409),
    symmetric as in flash-attn.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi: (h,), of the heads at hand."""
    dropout: Dropout | None = None
    bias: PositionBias | None = None
    """Of the heads at hand."""
    rows: Tensor | None = None
    """(i,) int64: the global positions of the rows, where slopes, dropout or bias ask for them."""
    keys: Tensor | None = None
    """(j,) int64: those of the keys."""

    def at(self, rows: Tensor, keys: Tensor) -> Scores:
        """Those of a tile whose rows and keys have these positions."""
        return replace(self, rows=rows, keys=keys)

    def part(self, rows: slice, keys: slice) -> Scores:
        """Those of some rows and keys of the tile."""
        if self.rows is None or self.keys is None:
            return self
        return self.at(self.rows[rows], self.keys[keys])

    def of_heads(self, heads: Range) -> Scores:
        """Those of the heads start to stop of the heads at hand."""
        slopes = None if self.slopes is None else self.slopes[slice(*heads)]
        dropout = None if self.dropout is None else self.dropout.of_heads(heads)
        return replace(self, slopes=slopes, dropout=dropout)
