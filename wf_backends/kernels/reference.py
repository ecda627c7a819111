"""Attention of one tile written as its formula: the meaning of every other kernel.

Slow, and it holds all i x j scores at once; but it takes any float dtype, any Band and any device,
and its float64 results are exact to rounding.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, r = h / g, d head_dim.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, KernelSpec, TileGrad
from wf_backends.schedule import Band


def band_mask(rows: int, keys: int, band: Band, device: torch.device) -> Tensor:
    """(rows, keys) bool: True where the row sees the key."""
    key = torch.arange(keys, device=device)
    row = torch.arange(rows, device=device)
    offset = key - row[:, None]
    return (offset >= -band.left) & (offset <= band.right)


class ReferenceKernel:
    """The Kernel protocol in a few einsums.

    Everything is computed and returned in float32, in float64 if any input is float64, under
    torch.autocast too.
    """

    name = "reference"

    def refuses(self, spec: KernelSpec) -> str | None:
        """Only a dtype that is not a float is refused."""
        if not spec.dtype.is_floating_point:
            return f"attention needs a float dtype, got {spec.dtype}"
        return None

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        return "einsums that hold all scores of a tile"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """out = softmax(scale q k^T) v and lse = logsumexp(scale q k^T); see Kernel.forward."""
        q, k, v = _widen(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            scores = _scores(q, k, scale, band)
            lse = scores.logsumexp(-1)
            out = torch.einsum("bgrij,bjgd->bigrd", torch.exp(scores - lse[..., None]), v)
        return out.flatten(2, 3), lse.flatten(1, 2)

    def backward(self, tile: TileGrad, scale: float, band: Band) -> Grads:
        """Gradients of the tile from delta alone: `out` is not looked at. See Kernel.backward."""
        dout, q, k, v, lse, delta = _widen(tile.dout, tile.q, tile.k, tile.v, tile.lse, tile.delta)
        q_heads, kv_heads = q.shape[2], k.shape[2]
        by_group = (kv_heads, q_heads // kv_heads)
        dout, q_grouped = dout.unflatten(2, by_group), q.unflatten(2, by_group)  # b i g r d
        lse, delta = (x.unflatten(1, by_group)[..., None] for x in (lse, delta))  # b g r i 1
        with torch.autocast(q.device.type, enabled=False):
            p = torch.exp(_scores(q, k, scale, band) - lse)
            dp = torch.einsum("bigrd,bjgd->bgrij", dout, v)
            ds = p * (dp - delta) * scale
            dq = torch.einsum("bgrij,bjgd->bigrd", ds, k).flatten(2, 3)
            dk = torch.einsum("bgrij,bigrd->bjgd", ds, q_grouped)
            dv = torch.einsum("bgrij,bigrd->bjgd", p, dout)
        return dq, dk, dv


def _widen(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype to compute in: float64 if any of them is, else float32."""
    double = any(x.dtype == torch.float64 for x in tensors)
    return [x.to(torch.float64 if double else torch.float32) for x in tensors]


def _scores(q: Tensor, k: Tensor, scale: float, band: Band) -> Tensor:
    """(b, g, r, i, j): scale q k^T, -inf where the band hides the key."""
    kv_heads = k.shape[2]
    grouped = q.unflatten(2, (kv_heads, q.shape[2] // kv_heads))
    scores = torch.einsum("bigrd,bjgd->bgrij", grouped, k) * scale
    hidden = ~band_mask(q.shape[1], k.shape[1], band, q.device)
    return scores.masked_fill(hidden, -inf)
