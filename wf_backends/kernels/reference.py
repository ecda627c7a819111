"""Attention of one tile written as its formula: the meaning of every other kernel.

Slow; but it takes any float dtype, any Band, all that `Scores` can say and any device, and its
float64 results are exact to rounding. Rows are computed in blocks, so that memory holds the scores
of one block alone.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, r = h / g, d head_dim of
queries and keys, e of values.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, KernelSpec, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import SubTile, row_blocks
from wf_backends.schedule import Band

BLOCK_SCORES = 1 << 22
"""Scores that a block of rows has at most, unless one row has more: 16 MiB in float32."""


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
        return "einsums that hold the scores of a block of rows"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """out = softmax(scores) v and lse = logsumexp(scores); see Kernel.forward and Scores."""
        q, k, v = _widen(q, k, v)
        blocks = [
            _forward(q[:, rows], k[:, keys], v[:, keys], scores.part(rows, keys), part_band)
            for rows, keys, part_band in _blocks(q, k, band)
        ]
        outs, lses = zip(*blocks, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """Gradients of the tile from delta alone: `out` is not looked at. See Kernel.backward."""
        tile = TileGrad(*_widen(*tile))
        dq, (dk, dv) = torch.empty_like(tile.q), map(torch.zeros_like, (tile.k, tile.v))
        for rows, keys, part_band in _blocks(tile.q, tile.k, band):
            part = tile.part(rows, keys)
            dq[:, rows], more_dk, more_dv = _backward(part, scores.part(rows, keys), part_band)
            dk[:, keys] += more_dk
            dv[:, keys] += more_dv
        return dq, dk, dv


def _widen(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype to compute in: float64 if any of them is, else float32."""
    double = any(x.dtype == torch.float64 for x in tensors)
    return [x.to(torch.float64 if double else torch.float32) for x in tensors]


def _blocks(q: Tensor, k: Tensor, band: Band) -> tuple[SubTile, ...]:
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    return row_blocks(rows, keys, band, max(1, BLOCK_SCORES // max(1, batch * heads * keys)))


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        x = _hidden(_biased(_capped(q, k, scores), scores), band)
        lse = x.logsumexp(-1)
        p = _dropped(torch.exp(x - lse[..., None]), scores)
        out = torch.einsum("bgrij,bjge->bigre", p, v)
    return out.flatten(2, 3), lse.flatten(1, 2)


def _backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    dout, q, k, v, _, lse, delta = tile
    by_group = (k.shape[2], q.shape[2] // k.shape[2])
    dout, q_grouped = dout.unflatten(2, by_group), q.unflatten(2, by_group)  # b i g r d
    lse, delta = (x.unflatten(1, by_group)[..., None] for x in (lse, delta))  # b g r i 1
    with torch.autocast(q.device.type, enabled=False):
        capped = _capped(q, k, scores)
        p = torch.exp(_hidden(_biased(capped, scores), band) - lse)
        dp = _dropped(torch.einsum("bigre,bjge->bgrij", dout, v), scores)
        ds = p * (dp - delta)
        _keep_bias_grad(ds, scores)
        ds = ds * scores.scale
        if scores.softcap:
            ds = ds * (1 - (capped / scores.softcap).square())
        dq = torch.einsum("bgrij,bjgd->bigrd", ds, k).flatten(2, 3)
        dk = torch.einsum("bgrij,bigrd->bjgd", ds, q_grouped)
        dv = torch.einsum("bgrij,bigre->bjge", _dropped(p, scores), dout)
    return dq, dk, dv


def _capped(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """(b, g, r, i, j): scale q k^T, soft-capped."""
    grouped = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    x = torch.einsum("bigrd,bjgd->bgrij", grouped, k) * scores.scale
    return scores.softcap * torch.tanh(x / scores.softcap) if scores.softcap else x


def _biased(x: Tensor, scores: Scores) -> Tensor:
    """x (b, g, r, i, j) with ALiBi's bias and the learned one."""
    if scores.slopes is scores.bias is None:
        return x
    assert scores.rows is not None and scores.keys is not None
    by_group = (x.shape[1], x.shape[2])
    if scores.slopes is not None:
        slopes = scores.slopes.to(x).unflatten(0, by_group)  # g r
        x = x - slopes[..., None, None] * (scores.rows[:, None] - scores.keys).abs()
    if scores.bias is not None:
        x = x + scores.bias.of(scores.rows, scores.keys).to(x).unflatten(0, by_group)
    return x


def _keep_bias_grad(ds: Tensor, scores: Scores) -> None:
    """Of the scores' gradient ds (b, g, r, i, j), the learned bias's."""
    if scores.bias is not None:
        assert scores.rows is not None and scores.keys is not None
        scores.bias.add_grad(ds.sum(0).flatten(0, 1), scores.rows, scores.keys)


def _dropped(p: Tensor, scores: Scores) -> Tensor:
    """The weights p (b, g, r, i, j), or their gradients, after dropout."""
    if scores.dropout is None:
        return p
    assert scores.rows is not None and scores.keys is not None
    factors = scores.dropout.factors(p.shape[0], scores.rows, scores.keys)
    return p * factors.to(p.dtype).view_as(p)


def _hidden(x: Tensor, band: Band) -> Tensor:
    """x (b, g, r, i, j), -inf where the band hides the key."""
    return x.masked_fill(~band_mask(x.shape[3], x.shape[4], band, x.device), -inf)
