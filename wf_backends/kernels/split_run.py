"""Run a kernel over the pieces of a tile and put the results together.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.merge import merge_
from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.tile_split import Cut, Piece
from wf_backends.schedule import Band

Forward = Callable[[Tensor, Tensor, Tensor, float, Band], tuple[Tensor, Tensor]]
Backward = Callable[[TileGrad, float, Band], Grads]


@dataclass(frozen=True, slots=True)
class Operators:
    """A library's forward and backward, and the cut that makes pieces which they take."""

    name: str
    cut: Cut
    forward: Forward
    backward: Backward


def piecewise_forward(
    run: Forward, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Kernel.forward of a tile that `run` takes piece by piece.

    Returns:
        out (b, i, h, d), in the dtype that `run` gives if there is one piece, else float32 or
        float64;
        lse (b, h, i).
    """
    if len(pieces) == 1:  # has all rows and keys
        return run(q, k, v, scale, pieces[0].band)
    parts = ((p.rows, run(q[:, p.rows], k[:, p.keys], v[:, p.keys], scale, p.band)) for p in pieces)
    b, i, h, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((b, i, h), -inf, dtype=dtype, device=q.device)
    for rows, (part, part_lse) in parts:
        merge_(out[:, rows], lse[:, rows], part, part_lse.transpose(1, 2))
    return out, lse.transpose(1, 2)


def piecewise_backward(
    run: Backward, pieces: Sequence[Piece], tile: TileGrad, scale: float
) -> Grads:
    """Kernel.backward of a tile that `run` takes piece by piece.

    Returns:
        dq (b, i, h, d), dk and dv (b, j, g, d), in the dtype that `run` gives if there is one
        piece, else float32 or float64.
    """
    dout, q, k, v, out, *stats = tile
    tile = TileGrad(dout.to(q.dtype), q, k, v, out.to(q.dtype), *stats)
    if len(pieces) == 1:  # has all rows and keys
        return run(tile, scale, pieces[0].band)
    parts = (run(tile.part(p.rows, p.keys), scale, p.band) for p in pieces)
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for piece, (part_dq, part_dk, part_dv) in zip(pieces, parts, strict=True):
        dq[:, piece.rows] += part_dq
        dk[:, piece.keys] += part_dk
        dv[:, piece.keys] += part_dv
    return dq, dk, dv
