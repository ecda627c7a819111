"""Reads the rows of a table that each row chose.

Shapes: b batch, s rows, S rows of the table, g key heads, t chosen keys, w numbers of a row of the
table, n rows of a block.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from wf_backends.runtime import accumulator_dtype
from wf_backends.sparse.function import Columns, Read

BLOCK_ELEMENTS = 1 << 24
"""Of the keys and values that a block reads: 64 MiB in float32."""


class ChosenRows:
    """A `Reader` of chosen rows.

    Args:
        table: (b, S, g, w).
        chosen: (b, s, g or 1, t) integers: rows of the table; -1 = none.
    """

    def __init__(self, columns: Columns, table: Tensor, chosen: Tensor, _: torch.Size) -> None:
        self.columns, self._chosen = columns, chosen
        samples, length, self._heads, self._width = table.shape
        self._table = table.reshape(-1, self._width)
        sample_and_head = torch.arange(samples * self._heads, device=table.device)
        first = sample_and_head // self._heads * length * self._heads
        self._first = (first + sample_and_head % self._heads).view(samples, 1, self._heads, 1)
        row_elements = samples * self._heads * chosen.shape[3] * self._width
        self.block_rows = BLOCK_ELEMENTS // max(1, row_elements)

    def read(self, rows: slice) -> Read:
        """(b, n, g, t, w)"""
        chosen = self._chosen[:, rows].long()
        index = self._first + chosen.clamp(min=0) * self._heads
        taken = self._table.index_select(0, index.flatten()).view(*index.shape, self._width)
        taken = taken.to(accumulator_dtype(taken.dtype))
        return Read(taken, (chosen < 0).unsqueeze(3), partial(_add_rows, index.flatten()))


def _add_rows(index: Tensor, total: Tensor, grad: Tensor) -> None:
    total.view(-1, total.shape[-1]).index_add_(0, index, grad.flatten(0, -2))
