"""ALiBi on kernels that know nothing of it: more dimensions of queries and keys.

Where no row i sees a later key j, of a tile whose last key is at position z,

    -slope |i - j| = -slope (z - j) - slope (i - z)

The first term is a product of a number of the head and one of the key: further dimensions of q and
k. The second is one number for each row: it leaves weights as they are, and is taken off lse.

Numbers of 16 bits would round both. So a distance is three digits of 8 bits, a slope the sum of
three numbers of 8 bits, and each pair of these a dimension: products that are exact in the float32
in which such kernels add up.

(flash-attn's own `alibi_slopes` count i and j in a tile, as if it stood on the diagonal: in every
other tile the distances of some pairs have the wrong sign.)

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.kernels.protocol import Grads, Kernel, KernelSpec, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.schedule import Band

BASE, PARTS = 256, 3
DIMENSIONS = {torch.float64: 1, torch.float32: 1, torch.bfloat16: 16}
"""That ALiBi takes: one, or PARTS x PARTS and zeros up to what flash kernels take."""


class AlibiKernel:
    """The Kernel protocol on another kernel; for tiles in which no row sees a later key."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self._kernel = kernel.name, kernel

    def refuses(self, spec: KernelSpec) -> str | None:
        """See Kernel.refuses."""
        if not spec.looks_back:
            return "it has no ALiBi where rows see later keys"
        if spec.softcap:
            return "it has no soft cap before ALiBi"
        if spec.dtype not in DIMENSIONS:
            return f"it has no ALiBi for {spec.dtype}"
        return self._kernel.refuses(_wider(spec))

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        return f"{self._kernel.runs(_wider(spec))}, ALiBi as dimensions of queries and keys"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        wide, shift = _with_distances(q, k, scores)
        out, lse = self._kernel.forward(*wide, v, replace(scores, slopes=None), band)
        return out, lse - shift.to(lse.dtype)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward."""
        (q, k), shift = _with_distances(tile.q, tile.k, scores)
        wide = tile._replace(q=q, k=k, lse=tile.lse + shift.to(tile.lse.dtype))
        dq, dk, dv = self._kernel.backward(wide, replace(scores, slopes=None), band)
        width = tile.q.shape[3]
        return dq[..., :width], dk[..., :width], dv


def _wider(spec: KernelSpec) -> KernelSpec:
    more = DIMENSIONS[spec.dtype]
    value_dim = spec.value_dim or spec.head_dim
    return replace(spec, head_dim=spec.head_dim + more, value_dim=value_dim, alibi=False)


def _with_distances(q: Tensor, k: Tensor, scores: Scores) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """q and k with further dimensions, and slope (i - z) as (h, i) float64."""
    assert scores.slopes is not None and scores.rows is not None and scores.keys is not None
    slopes = scores.slopes.double()
    last = scores.keys.max()
    of_heads, of_keys = _factors(-slopes / scores.scale, last - scores.keys, q.dtype)
    wide_q = torch.cat((q, of_heads.expand(*q.shape[:3], -1)), -1)
    wide_k = torch.cat((k, of_keys[:, None].expand(*k.shape[:3], -1)), -1)
    return (wide_q, wide_k), slopes[:, None] * (scores.rows - last)


def _factors(weights: Tensor, distances: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(h, n) and (j, n) in `dtype`, whose products add up to weights (h,) times distances (j,)."""
    if DIMENSIONS[dtype] == 1:
        return weights[:, None].to(dtype), distances[:, None].to(dtype)
    digits = [distances // BASE**n % BASE for n in range(PARTS) for _ in range(PARTS)]
    pieces = [piece for n in range(PARTS) for piece in _pieces(weights * BASE**n, dtype)]
    zeros = DIMENSIONS[dtype] - PARTS * PARTS
    of_heads, of_keys = torch.stack(pieces, -1), torch.stack(digits, -1).to(dtype)
    return pad(of_heads, (0, zeros)), pad(of_keys, (0, zeros))


def _pieces(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of `dtype` that add up to x, but for what is beyond the last one."""
    found: list[Tensor] = []
    for _ in range(PARTS):
        found.append(x.to(dtype))
        x = x - found[-1].to(x.dtype)
    return found
