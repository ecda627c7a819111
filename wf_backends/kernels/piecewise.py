"""Run a kernel over the pieces of a tile and put the results together.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.pieces import Cut, Piece
from wf_backends.mask import Band
from wf_backends.merge import merge_

Forward = Callable[[Tensor, Tensor, Tensor, float, Band], tuple[Tensor, Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Band], Gradients]


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
        out (b, i, h, d), in the dtype of q if there is one piece, else float32 or float64;
        lse (b, h, i).
    """
    parts = ((p.rows, run(q[:, p.rows], k[:, p.keys], v[:, p.keys], scale, p.band)) for p in pieces)
    if len(pieces) == 1:
        return next(parts)[1]
    b, i, h, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    if pieces[0].rows == slice(0, i):  # nothing to start from but the first piece
        out, lse = (x.to(dtype) for x in next(parts)[1])
        lse = lse.transpose(1, 2)
    else:
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full((b, i, h), -inf, dtype=dtype, device=q.device)
    for rows, (part, part_lse) in parts:
        merge_(out[:, rows], lse[:, rows], part, part_lse.transpose(1, 2))
    return out, lse.transpose(1, 2)


def piecewise_backward(
    run: Backward,
    pieces: Sequence[Piece],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel.backward of a tile that `run` takes piece by piece.

    Returns:
        dq (b, i, h, d), dk and dv (b, j, g, d), in the dtype of q if there is one piece, else
        float32 or float64.
    """
    dout, out = dout.to(q.dtype), out.to(q.dtype)
    parts = (
        run(dout[:, r], q[:, r], k[:, c], v[:, c], out[:, r], lse[:, :, r], scale, p.band)
        for p in pieces
        for r, c in [(p.rows, p.keys)]
    )
    if len(pieces) == 1:
        return next(parts)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if pieces[0].rows == slice(0, q.shape[1]) and _in_turn(pieces, k.shape[1]):
        return _side_by_side(pieces, parts, k, dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for piece, (part_dq, part_dk, part_dv) in zip(pieces, parts, strict=True):
        dq[:, piece.rows] += part_dq
        dk[:, piece.keys] += part_dk
        dv[:, piece.keys] += part_dv
    return dq, dk, dv


def _in_turn(pieces: Sequence[Piece], num_keys: int) -> bool:
    """Whether every key is in one piece and no more."""
    keys = sorted((piece.keys.start, piece.keys.stop) for piece in pieces)
    edges = [0, *(edge for pair in keys for edge in pair), num_keys]
    return all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=True))


def _side_by_side(
    pieces: Sequence[Piece], parts: Iterator[Gradients], k: Tensor, dtype: torch.dtype
) -> Gradients:
    """The sum of pieces that have every key once; the first of them has all rows."""
    dk, dv = (torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    dq: Tensor | None = None
    for piece, (part_dq, part_dk, part_dv) in zip(pieces, parts, strict=True):
        if dq is None:
            dq = part_dq.to(dtype)
        else:
            dq[:, piece.rows] += part_dq
        dk[:, piece.keys] = part_dk
        dv[:, piece.keys] = part_dv
    assert dq is not None
    return dq, dk, dv
