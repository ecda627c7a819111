"""Results of several tiles as one: of tiles on the same rows, and of the sub-tiles of a tile that a
library does not take whole, for its Band or for values of another width.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim of queries and
keys, e of values; s rows of a buffer, which is rows-first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import Split
from wf_backends.schedule import Band


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's attention into (out, lse), in place.

        lse' = log(exp(lse) + exp(block_lse))
        out' = out + sigmoid(block_lse - lse) (block_out - out)

    Args:
        out: (s, b, h, e), float32 or float64. Running output, 0 where a row has met no key yet.
        lse: (s, b, h), same dtype, natural log, -inf where a row has met no key yet.
        block_out: (s, b, h, e), any float dtype. block_lse: (s, b, h), finite.

    Source: Milakov & Gimelshein 2018 (online softmax); the sigmoid form as in
    ring-flash-attention PR 34.
    """
    if block_out.dtype != out.dtype:
        block_out = block_out.to(out.dtype)
    if block_lse.dtype != lse.dtype:
        block_lse = block_lse.to(lse.dtype)
    weight = (block_lse - lse).sigmoid_()
    out.lerp_(block_out, weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


Forward = Callable[[Tensor, Tensor, Tensor, Scores, Band], tuple[Tensor, Tensor]]
Backward = Callable[[TileGrad, Scores, Band], Grads]


@dataclass(frozen=True, slots=True)
class Operators:
    """A library's forward and backward, and the split that makes sub-tiles which they take."""

    name: str
    split: Split
    forward: Forward
    backward: Backward


class SplitKernel(ABC):
    """What kernels have in common that run a library's operators, sub-tile by sub-tile."""

    @abstractmethod
    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """What computes the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward.

        Returns:
            out, in the dtype that the library gives if there is one sub-tile, else float32 or
            float64; lse.
        """
        width = v.shape[3]
        if q.shape[3] != width:
            q, k, v = _one_width(q, k, v)
            out, lse = self.forward(q, k, v, scores, band)
            return out[..., :width], lse
        run = self.operators(q, k, scores, band)
        parts = run.split(q.shape[1], k.shape[1], band)
        if len(parts) == 1:  # has all rows and keys
            return run.forward(q, k, v, scores, parts[0].band)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)
        begun = 0  # rows before have met keys already
        for rows, keys, part_band in parts:
            part = scores.part(rows, keys)
            block_out, block_lse = run.forward(q[:, rows], k[:, keys], v[:, keys], part, part_band)
            block_lse = block_lse.transpose(1, 2)
            if rows.start < begun:
                merge(out[:, rows], lse[:, rows], block_out, block_lse)
            else:
                out[:, rows], lse[:, rows], begun = block_out, block_lse, rows.stop
        return out, lse.transpose(1, 2)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward. The library gets out and dout in the dtype of q, and computes delta
        again from them.

        Returns:
            dq, dk and dv, in the dtype that the library gives if there is one sub-tile, else
            float32 or float64.
        """
        dout, q, k, v, out, lse, delta = tile
        if q.shape[3] != v.shape[3]:
            dout, wide_q, wide_k, wide_v, out = _one_width(dout, q, k, v, out)
            even = TileGrad(dout, wide_q, wide_k, wide_v, out, lse, delta)
            grads = self.backward(even, scores, band)
            dq, dk, dv = (one[..., : x.shape[3]] for one, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        run = self.operators(q, k, scores, band)
        if not dout.dtype == out.dtype == q.dtype:
            tile = TileGrad(dout.to(q.dtype), q, k, v, out.to(q.dtype), lse, delta)
        parts = run.split(q.shape[1], k.shape[1], band)
        if len(parts) == 1:  # has all rows and keys
            return run.backward(tile, scores, parts[0].band)
        dtype = torch.promote_types(q.dtype, torch.float32)
        totals = dq, dk, dv = [x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v)]
        for rows, keys, part_band in parts:
            grads = run.backward(tile.part(rows, keys), scores.part(rows, keys), part_band)
            for total, where, grad in zip(totals, (rows, keys, keys), grads, strict=True):
                total[:, where] += grad
        return dq, dk, dv


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors, zeros added behind their last dimension: scores and gradients stay the same."""
    widest = max(x.shape[3] for x in tensors)
    return [pad(x, (0, widest - x.shape[3])) for x in tensors]
