"""Merging the results of several tiles: of tiles with the same rows and other keys, and of the
sub-tiles into which a tile is split where a library does not support its Band or its size.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim of queries and
keys, e of values; s rows of a buffer, which is rows-first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.kernels.protocol import Grads, OutLse, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import Split, SubTile
from wf_backends.schedule import Band


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's attention into (out, lse), in place.

        lse' = log(exp(lse) + exp(block_lse))
        out' = out + sigmoid(block_lse - lse) (block_out - out)

    Args:
        out: (s, b, h, e) or (b, i, h, e), float32 or float64. Running output, 0 where a row has
            met no key yet.
        lse: out's shape without e, same dtype, natural log, -inf where a row has met no key yet.
        block_out: out's shape, any float dtype. block_lse: lse's shape, finite.

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


Forward = Callable[[Tensor, Tensor, Tensor, Scores, Band], OutLse]
Backward = Callable[[TileGrad, Scores, Band], Grads]


def forward_of_sub_tiles(
    forward: Forward, sub_tiles: Sequence[SubTile], qkv: Sequence[Tensor], scores: Scores
) -> OutLse:
    """(out, lse) of a tile from those of its sub-tiles; see Kernel.forward.

    out is in float32 or float64 if there are several, else in the dtype that `forward` returns.
    """
    q, k, v = qkv
    if len(sub_tiles) == 1:  # has all rows and keys
        return forward(q, k, v, scores, sub_tiles[0].band)
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)  # b i h
    filled_rows = 0  # rows before this one hold a result already
    for rows, keys, band in sub_tiles:
        args = q[:, rows], k[:, keys], v[:, keys], scores.part(rows, keys), band
        block_out, block_lse = forward(*args)
        block_lse = block_lse.transpose(1, 2)
        if rows.start < filled_rows:
            merge(out[:, rows], lse[:, rows], block_out, block_lse)
        else:
            out[:, rows], lse[:, rows] = block_out, block_lse
            filled_rows = rows.stop
    return out, lse.transpose(1, 2)


def backward_of_sub_tiles(
    backward: Backward, sub_tiles: Sequence[SubTile], tile: TileGrad, scores: Scores
) -> Grads:
    """Gradients of a tile from those of its sub-tiles; see Kernel.backward.

    dq is in float32 or float64 if rows are in several, dk and dv if keys are; else they are in the
    dtype of q, or that of `backward`.
    """
    if len(sub_tiles) == 1:  # has all rows and keys
        return backward(tile, scores, sub_tiles[0].band)
    _, q, k, v, *_ = tile
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    keys_are_in_one = sum(keys.stop - keys.start for _, keys, _ in sub_tiles) == k.shape[1]
    keys_dtype = q.dtype if keys_are_in_one else sum_dtype
    dq = torch.zeros_like(q, dtype=sum_dtype)
    dk, dv = (torch.zeros_like(x, dtype=keys_dtype) for x in (k, v))
    for rows, keys, band in sub_tiles:
        grads = backward(tile.part(rows, keys), scores.part(rows, keys), band)
        dq[:, rows] += grads[0]
        dk[:, keys] += grads[1]
        dv[:, keys] += grads[2]
    return dq, dk, dv


@dataclass(frozen=True, slots=True)
class Operators:
    """A library's forward and backward, and the split into sub-tiles that they support."""

    name: str
    split: Split
    forward: Forward
    backward: Backward


class SplitKernel:
    """Base of the kernels that split a tile and run a library's operators on its sub-tiles.

    Where the head_dims of keys and values differ, the smaller one is filled up with zeros.
    """

    operators: Callable[[Tensor, Tensor, Band], Operators]
    """The operators for the tile of q (b, i, h, d) and k (b, j, g, d) under a band."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        value_dim = v.shape[3]
        if q.shape[3] != value_dim:
            q, k, v = _pad_to_same_dim(q, k, v)
            out, lse = self.forward(q, k, v, scores, band)
            return out[..., :value_dim], lse
        operators = self.operators(q, k, band)
        sub_tiles = operators.split(q.shape[1], k.shape[1], band)
        return forward_of_sub_tiles(operators.forward, sub_tiles, (q, k, v), scores)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward. The library gets out and dout in the dtype of q, and computes delta
        again from them.
        """
        dout, q, k, v, out, lse, delta = tile
        if q.shape[3] != v.shape[3]:
            dout, padded_q, padded_k, padded_v, out = _pad_to_same_dim(dout, q, k, v, out)
            padded = TileGrad(dout, padded_q, padded_k, padded_v, out, lse, delta)
            dq, dk, dv = self.backward(padded, scores, band)
            return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]
        operators = self.operators(q, k, band)
        if not dout.dtype == out.dtype == q.dtype:
            tile = TileGrad(dout.to(q.dtype), q, k, v, out.to(q.dtype), lse, delta)
        sub_tiles = operators.split(q.shape[1], k.shape[1], band)
        return backward_of_sub_tiles(operators.backward, sub_tiles, tile, scores)


def _pad_to_same_dim(*tensors: Tensor) -> list[Tensor]:
    """The tensors with zeros appended along dim 3; scores and gradients stay the same."""
    max_dim = max(x.shape[3] for x in tensors)
    return [pad(x, (0, max_dim - x.shape[3])) for x in tensors]
