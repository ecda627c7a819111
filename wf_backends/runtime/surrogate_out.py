"""The stand-in for out in backward tiles of rows whose output is on another rank.

Outputs are not sent in the backward: flash kernels need only delta = rowsum(dout * out) of them.

Buffers are rows-first: s rows, b batch, h query heads, d head_dim; i query rows of a tile.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from wf_backends.schedule import Ranges, subtract, union


class SurrogateOut:
    """The outputs of a buffer of queries: given for all rows, or stand-ins, computed once per row.

    Args:
        dout: (s, b, h, d), the buffer with the gradients of the outputs.
        out: (s, b, h, d), dout's dtype, the outputs of all rows; None = stand-ins.
    """

    def __init__(self, dout: Tensor, out: Tensor | None = None) -> None:
        self.dout = dout
        self._out = torch.empty_like(dout) if out is None else out
        self._filled: Ranges = () if out is None else ((0, dout.size(0)),)

    def read(self, rows: Ranges, stats: Tensor) -> Tensor:
        """The buffer of outputs (s, b, h, d), filled at least in these rows.

        Args:
            stats: (s, 2, b, h), [lse, delta]; these rows of stats and of dout have arrived.
        """
        missing, self._filled = _missing_and_filled(rows, self._filled)
        for start, stop in missing:
            delta = stats[start:stop, 1].permute(1, 2, 0)
            out = stand_in(self.dout[start:stop].transpose(0, 1), delta)
            self._out[start:stop] = out.transpose(0, 1)
        return self._out


@lru_cache(maxsize=1024)  # called for every tile
def _missing_and_filled(rows: Ranges, filled: Ranges) -> tuple[Ranges, Ranges]:
    """The `rows` that are not filled yet, and all that are filled with them."""
    return subtract(rows, filled), union(filled, rows)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor x with rowsum(dout * x) == delta.

    Flash kernels recompute delta from (dout, out), so that x serves them in place of out.

    Args:
        dout: (b, i, h, d). delta: (b, h, i), accumulator dtype.

    Returns:
        (b, i, h, d), dout's dtype: dout's direction, scaled.
    """
    grad = dout.to(delta.dtype)
    unit = grad.abs()
    peak = unit.amax(-1, keepdim=True)
    peak = peak.where(peak > 0, 1)
    torch.div(grad, peak, out=unit)
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True).square()
    norm = norm.where(norm > 0, 1)
    return unit.mul_(delta.transpose(1, 2).unsqueeze(-1) / peak / norm).to(dout.dtype)
