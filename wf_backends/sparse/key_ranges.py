"""Reads consecutive rows of a table for each row.

Shapes: b batch, s rows, h query heads, d head_dim, T rows of the table, n rows of a block, t rows
of the table that some row of a block sees.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from wf_backends.runtime import accumulator_dtype
from wf_backends.sparse.function import BOTH, Read

BLOCK_SCORES = 1 << 24
"""Of all heads in a block: 64 MiB in float32."""
BLOCK_ROWS = 128
"""Of a block, or as many as a row sees keys, if these are more: it reads all its rows' keys."""


class KeyRanges:
    """A `Reader` of keys that are the values too, the same for all heads.

    Args:
        table: (b, T, d).
        limits: (2, s) integers on the CPU: row i sees keys limits[0, i] up to limits[1, i],
            exclusive.
    """

    columns = BOTH

    def __init__(self, table: Tensor, limits: Tensor, q_shape: torch.Size) -> None:
        self._table, self._limits = table, limits
        self._on_device = limits.to(table.device)  # once: a copy for each block would wait
        counts = limits[1] - limits[0]
        longest = max(BLOCK_ROWS, int(counts.max()) if counts.numel() else 0)
        # a block has about twice the keys
        self.block_rows = min(longest, BLOCK_SCORES // (2 * longest * q_shape[0] * q_shape[2]))

    def read(self, rows: slice) -> Read:
        """(b, 1, 1, t, d)"""
        starts, stops = self._limits[:, rows]
        columns = slice(int(starts.min()), int(stops.max()))
        taken = self._table[:, columns].to(accumulator_dtype(self._table.dtype))
        place = torch.arange(columns.start, columns.stop, device=taken.device)
        starts, stops = self._on_device[:, rows, None]
        hidden = (place < starts) | (place >= stops)
        return Read(taken[:, None, None], hidden[None, :, None, None], partial(_add, columns))


def _add(columns: slice, total: Tensor, grad: Tensor) -> None:
    total[:, columns] += grad[:, 0, 0]
