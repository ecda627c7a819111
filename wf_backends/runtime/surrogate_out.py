"""What a backward kernel is given as the output of its rows, where the output did not travel.

Buffers are rows-first: s rows, b batch, h query heads, d head_dim; i query rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.schedule import Ranges, subtract, union


class Outputs:
    """For the rows of a buffer of queries their output, or a stand-in that is computed once.

    Args:
        dout: (s, b, h, d), the buffer with the gradients of the outputs.
        rows: (s, b, h, d), dout's dtype, where some outputs are known.
        known: the slices of `rows` that are.
    """

    def __init__(self, dout: Tensor, rows: Tensor | None = None, known: Ranges = ()) -> None:
        self.dout, self._rows, self._known = dout, rows, known

    def read(self, rows: Ranges, stats: Tensor) -> Tensor:
        """A buffer like dout, filled at least in the slices `rows`.

        Args:
            stats: (s, 2, b, h), [lse, delta], which has landed for these rows as dout has.
        """
        for start, stop in subtract(rows, self._known):
            delta = stats[start:stop, 1].permute(1, 2, 0)
            found = stand_in(self.dout[start:stop].transpose(0, 1), delta).transpose(0, 1)
            if stop - start == self.dout.size(0):
                self._rows = found
            else:
                self._buffer()[start:stop] = found
        self._known = union(self._known, rows)
        return self._buffer()

    def _buffer(self) -> Tensor:
        if self._rows is None:
            self._rows = torch.empty_like(self.dout)
        return self._rows


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
