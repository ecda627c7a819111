"""A tile computed sub-tile by sub-tile, by a library that cannot take its Band whole.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wf_backends.kernels.merge import merge
from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import Split
from wf_backends.schedule import Band

Forward = Callable[[Tensor, Tensor, Tensor, Scores, Band], tuple[Tensor, Tensor]]
Backward = Callable[[TileGrad, Scores, Band], Grads]


@dataclass(frozen=True, slots=True)
class Operators:
    """A library's forward and backward, and the split that makes sub-tiles which they take."""

    name: str
    split: Split
    forward: Forward
    backward: Backward


def split_forward(
    run: Operators, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """Kernel.forward of a tile by `run`.

    Returns:
        out (b, i, h, d), in the dtype that `run` gives if there is one sub-tile, else float32 or
        float64; lse (b, h, i).
    """
    parts = run.split(q.shape[1], k.shape[1], band)
    if len(parts) == 1:  # has all rows and keys
        return run.forward(q, k, v, scores, parts[0].band)
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)
    begun = 0  # rows before have met keys already
    for rows, keys, part_band in parts:
        block_out, block_lse = run.forward(q[:, rows], k[:, keys], v[:, keys], scores, part_band)
        block_lse = block_lse.transpose(1, 2)
        if rows.start < begun:
            merge(out[:, rows], lse[:, rows], block_out, block_lse)
        else:
            out[:, rows], lse[:, rows], begun = block_out, block_lse, rows.stop
    return out, lse.transpose(1, 2)


def split_backward(run: Operators, tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """Kernel.backward of a tile by `run`, which gets out and dout in the dtype of q.

    Returns:
        dq (b, i, h, d), dk and dv (b, j, g, d), in the dtype that `run` gives if there is one
        sub-tile, else float32 or float64.
    """
    dout, q, k, v, out, lse, delta = tile
    if not dout.dtype == out.dtype == q.dtype:
        tile = TileGrad(dout.to(q.dtype), q, k, v, out.to(q.dtype), lse, delta)
    parts = run.split(q.shape[1], k.shape[1], band)
    if len(parts) == 1:  # has all rows and keys
        return run.backward(tile, scores, parts[0].band)
    dtype = torch.promote_types(q.dtype, torch.float32)
    totals = dq, dk, dv = [x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v)]
    for rows, keys, part_band in parts:
        grads = run.backward(tile.part(rows, keys), scores, part_band)
        for total, where, grad in zip(totals, (rows, keys, keys), grads, strict=True):
            total[:, where] += grad
    return dq, dk, dv
