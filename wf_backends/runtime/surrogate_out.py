"""The output that a backward kernel is given for rows whose real output is on another rank.

Buffers are rows-first: s rows, b batch, h query heads, d head_dim; i query rows of a tile.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from wf_backends.schedule import Ranges, subtract, union


class SurrogateOut:
    """The outputs of a buffer of queries: the real ones where known, else stand-ins, computed once.

    Args:
        dout: (s, b, h, d), the buffer with the gradients of the outputs.
        out: (s, b, h, d), dout's dtype, the outputs of all rows where they are known.
    """

    def __init__(self, dout: Tensor, out: Tensor | None = None) -> None:
        self.dout = dout
        self._out = torch.empty_like(dout) if out is None else out
        self._known: Ranges = () if out is None else ((0, dout.size(0)),)

    def read(self, rows: Ranges, stats: Tensor) -> Tensor:
        """A buffer like dout, filled at least in the slices `rows`.

        Args:
            stats: (s, 2, b, h), [lse, delta], which has landed for these rows as dout has.
        """
        missing, self._known = _missing_and_all(rows, self._known)
        for start, stop in missing:
            delta = stats[start:stop, 1].permute(1, 2, 0)
            found = stand_in(self.dout[start:stop].transpose(0, 1), delta)
            self._out[start:stop] = found.transpose(0, 1)
        return self._out


@lru_cache(maxsize=1024)  # asked for every tile
def _missing_and_all(rows: Ranges, known: Ranges) -> tuple[Ranges, Ranges]:
    """The rows that are not known yet, and all that are known with them."""
    return subtract(rows, known), union(known, rows)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor with rowsum(dout * it) == delta, so that the output itself need not travel.

    Flash kernels recompute delta from (dout, out); any such tensor serves them as well.

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
