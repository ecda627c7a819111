"""Readers: which rows of a table each row of queries sees, as `function.KeysAttention` asks.

Shapes: b batch, s rows, h query heads, g key heads, d head_dim, w numbers of a row of the table, S
rows of the table, n rows of a block, t keys of a row that chose them, or that some row of a block
sees.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from wf_backends.runtime import accumulator_dtype
from wf_backends.sparse.function import BOTH, Columns, Read

BLOCK_ELEMENTS = 1 << 24
"""Of the keys and values that a block reads for rows that chose them: 64 MiB in float32."""
BLOCK_SCORES = 1 << 24
"""Of all heads in a block of rows that see ranges of keys: 64 MiB in float32."""
BLOCK_ROWS = 128
"""Of such a block, or as many as a row sees keys, if these are more: it has all its rows' keys."""


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


class KeyRanges:
    """A `Reader` of keys that are the values too, the same for all heads.

    Args:
        table: (b, S, d).
        limits: (2, s) integers on the CPU: row i sees keys limits[0, i] up to limits[1, i],
            exclusive.
    """

    columns = BOTH

    def __init__(self, table: Tensor, limits: Tensor, q_shape: torch.Size) -> None:
        self._table, self._limits = table, limits
        self._on_device = limits.to(table.device)  # once: a copy for each block would wait
        counts = limits[1] - limits[0]
        longest = max(BLOCK_ROWS, int(counts.max()) if counts.numel() else 0)
        row_scores = 2 * longest * q_shape[0] * q_shape[2]  # a block has about twice the keys
        self.block_rows = min(longest, BLOCK_SCORES // max(1, row_scores))

    def read(self, rows: slice) -> Read:
        """(b, 1, 1, t, d)"""
        starts, stops = self._limits[:, rows]
        columns = slice(int(starts.min()), int(stops.max()))
        taken = self._table[:, columns].to(accumulator_dtype(self._table.dtype))
        place = torch.arange(columns.start, columns.stop, device=taken.device)
        starts, stops = self._on_device[:, rows, None]
        hidden = (place < starts) | (place >= stops)
        return Read(
            taken[:, None, None], hidden[None, :, None, None], partial(_add_columns, columns)
        )


def _add_columns(columns: slice, total: Tensor, grad: Tensor) -> None:
    total[:, columns] += grad[:, 0, 0]
