"""Attention of one tile written as its formula, against which the other kernels are tested.

It is slow, but supports every float dtype, Band, device and option of `Scores`, and its float64
results are exact to rounding. Rows are computed in blocks, so that only the scores of one block are
in memory.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, r = h / g, d head_dim of
queries and keys, e of values.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.merge import backward_of_sub_tiles, forward_of_sub_tiles
from wf_backends.kernels.protocol import Grads, KernelSpec, OutLse, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import SubTile, row_blocks
from wf_backends.schedule import Band

BLOCK_SCORES = 1 << 22
"""Scores in a block of rows (at least one row): 16 MiB in float32."""
CUDA_BLOCKS = 8
"""Blocks of this size that a GPU computes at once: its kernels are launched less often."""


def band_mask(rows: int, keys: int, band: Band, device: torch.device) -> Tensor:
    """(rows, keys) bool: True where the row sees the key."""
    row = torch.arange(rows, device=device)[:, None]
    distance = torch.arange(keys, device=device) - row
    return (distance >= -band.left) & (distance <= band.right)


class ReferenceKernel:
    """The Kernel protocol in a few einsums.

    Computes and returns float32, or float64 if any input is float64; torch.autocast has no effect.
    """

    name = "reference"

    def refuses(self, spec: KernelSpec) -> str | None:
        """Refuses dtypes that are not floating point only; see Kernel.refuses."""
        if not spec.dtype.is_floating_point:
            return f"attention needs a float dtype, got {spec.dtype}"
        return None

    def runs(self, spec: KernelSpec) -> str:
        return "einsums that hold the scores of a block of rows"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        """out = softmax(scores) v and lse = logsumexp(scores); see Kernel.forward and Scores."""
        q, k, v = _to_compute_dtype(q, k, v)
        return forward_of_sub_tiles(_forward, _blocks(q, k, band), (q, k, v), scores)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """Gradients of the tile, from delta and without `out`; see Kernel.backward."""
        tile = TileGrad(*_to_compute_dtype(*tile))
        return backward_of_sub_tiles(_backward, _blocks(tile.q, tile.k, band), tile, scores)


def _to_compute_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors in float64 if any of them is float64, else in float32."""
    has_float64 = any(x.dtype == torch.float64 for x in tensors)
    return [x.to(torch.float64 if has_float64 else torch.float32) for x in tensors]


def _blocks(q: Tensor, k: Tensor, band: Band) -> tuple[SubTile, ...]:
    """The tile as blocks of rows, with at most BLOCK_SCORES scores on a CPU."""
    batch, rows, heads, _ = q.shape
    keys, scores = k.shape[1], BLOCK_SCORES * (CUDA_BLOCKS if q.is_cuda else 1)
    return row_blocks(rows, keys, band, max(1, scores // max(1, batch * heads * keys)))


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
    with torch.autocast(q.device.type, enabled=False):
        x = _apply_mask(_add_biases(_capped_scores(q, k, scores), scores), band)
        lse = x.logsumexp(-1)
        p = _apply_dropout(torch.exp(x - lse[..., None]), scores)
        out = torch.einsum("bgrij,bjge->bigre", p, v)
    return out.flatten(2, 3), lse.flatten(1, 2)


def _backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    dout, q, k, v, _, lse, delta = tile
    by_group = (k.shape[2], q.shape[2] // k.shape[2])
    dout, q_grouped = dout.unflatten(2, by_group), q.unflatten(2, by_group)  # b i g r d
    lse, delta = (x.unflatten(1, by_group)[..., None] for x in (lse, delta))  # b g r i 1
    with torch.autocast(q.device.type, enabled=False):
        capped = _capped_scores(q, k, scores)
        p = torch.exp(_apply_mask(_add_biases(capped, scores), band) - lse)
        dp = _apply_dropout(torch.einsum("bigre,bjge->bgrij", dout, v), scores)
        ds = p * (dp - delta)
        _add_bias_grad(ds, scores)
        ds = ds * scores.scale
        if scores.softcap:
            ds = ds * (1 - (capped / scores.softcap).square())
        dq = torch.einsum("bgrij,bjgd->bigrd", ds, k).flatten(2, 3)
        dk = torch.einsum("bgrij,bigrd->bjgd", ds, q_grouped)
        dv = torch.einsum("bgrij,bigre->bjge", _apply_dropout(p, scores), dout)
    return dq, dk, dv


def _capped_scores(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """(b, g, r, i, j): scale q k^T, soft-capped."""
    grouped = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    x = torch.einsum("bigrd,bjgd->bgrij", grouped, k) * scores.scale
    return scores.softcap * torch.tanh(x / scores.softcap) if scores.softcap else x


def _add_biases(x: Tensor, scores: Scores) -> Tensor:
    """x (b, g, r, i, j) plus the bias of ALiBi and the learned bias."""
    if scores.slopes is scores.bias is None:
        return x
    assert scores.rows is not None and scores.keys is not None
    by_group = (x.shape[1], x.shape[2])
    if scores.slopes is not None:
        slopes = scores.slopes.to(x).unflatten(0, by_group)  # g r
        x = x - slopes[..., None, None] * (scores.rows[:, None] - scores.keys).abs()
    if scores.bias is not None:
        x = x + scores.bias.lookup(scores.rows, scores.keys).to(x).unflatten(0, by_group)
    return x


def _add_bias_grad(ds: Tensor, scores: Scores) -> None:
    """Add the scores' gradient ds (b, g, r, i, j) to the gradient of the learned bias."""
    if scores.bias is not None:
        assert scores.rows is not None and scores.keys is not None
        scores.bias.add_grad(ds.sum(0).flatten(0, 1), scores.rows, scores.keys)


def _apply_dropout(p: Tensor, scores: Scores) -> Tensor:
    """p (b, g, r, i, j), weights or their gradients, times the factors of dropout."""
    if scores.dropout is None:
        return p
    assert scores.rows is not None and scores.keys is not None
    is_kept = scores.dropout.keep_mask(p.shape[0], scores.rows, scores.keys)
    return p * is_kept.to(p.dtype).div_(1 - scores.dropout.p).view_as(p)


def _apply_mask(x: Tensor, band: Band) -> Tensor:
    """x (b, g, r, i, j) with -inf where the band hides the key."""
    return x.masked_fill(~band_mask(x.shape[3], x.shape[4], band, x.device), -inf)
