"""ALiBi on kernels that do not support it: the bias becomes extra dimensions of q and k.

In a tile where no row i sees a later key j, and whose last key is at position z,

    -slope |i - j| = -slope (z - j) - slope (i - z)

The first term is a factor of the head times a factor of the key, so extra dimensions of q and k
add it to their product. The second term is constant in a row: it does not change the softmax
weights, only lse, from which it is subtracted.

16-bit dtypes would round both factors. So a distance is written as four digits of 8 bits, and a
slope as the sum of three numbers of 8 bits. Each pair of them takes one dimension, and its product
is exact in the float32 in which flash kernels accumulate. Scores are rounded there, to 2**-24 of
slope (z - j). So rows that see only some of a tile's keys are computed in blocks that are not long,
and there is no gap in them (`Problem.joins_ranges`).

(flash-attn's own `alibi_slopes` count i and j inside the tile, as if the tile stood on the
diagonal: in every other tile the distances of some pairs have the wrong sign.)

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim, n extra dims.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.kernels.merge import backward_of_sub_tiles, forward_of_sub_tiles
from wf_backends.kernels.protocol import Grads, Kernel, KernelSpec, OutLse, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import SubTile, row_blocks
from wf_backends.schedule import Band

DIGIT_BASE = 256
NUM_DIGITS = 4  # of a distance, which is below 2**32 tokens
NUM_TERMS = 3  # numbers that add up to a slope
EXTRA_DIMS = {torch.float64: 1, torch.float32: 8, torch.bfloat16: 16}
"""1, or for bfloat16 NUM_DIGITS x NUM_TERMS, and zeros up to a multiple of 8, as kernels need."""
BLOCK_ROWS = {torch.float64: 1 << 24, torch.float32: 1 << 10, torch.bfloat16: 1 << 14}
"""Rows of a block: 2**-24 of so many tokens is a small part of the rounding of an output."""


class AlibiKernel:
    """The Kernel protocol: adds ALiBi to another kernel, for tiles without later keys."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self._kernel = kernel.name, kernel

    def refuses(self, spec: KernelSpec) -> str | None:
        if not spec.looks_back:
            return "it has no ALiBi where rows see later keys"
        if spec.softcap:
            return "it has no soft cap before ALiBi"
        if spec.dtype not in EXTRA_DIMS:
            return f"it has no ALiBi for {spec.dtype}"
        return self._kernel.refuses(_extended_spec(spec))

    def runs(self, spec: KernelSpec) -> str:
        return f"{self._kernel.runs(_extended_spec(spec))}, ALiBi as dimensions of queries and keys"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        if len(blocks := _blocks(q, k, band)) > 1:
            return forward_of_sub_tiles(self.forward, blocks, (q, k, v), scores)
        q, k, row_bias = _append_distances(q, k, scores)
        out, lse = self._kernel.forward(q, k, v, replace(scores, slopes=None), band)
        return out, lse - row_bias.to(lse.dtype)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        if len(blocks := _blocks(tile.q, tile.k, band)) > 1:
            return backward_of_sub_tiles(self.backward, blocks, tile, scores)
        q, k, row_bias = _append_distances(tile.q, tile.k, scores)
        extended = tile._replace(q=q, k=k, lse=tile.lse + row_bias.to(tile.lse.dtype))
        dq, dk, dv = self._kernel.backward(extended, replace(scores, slopes=None), band)
        return dq[..., : tile.q.shape[3]], dk[..., : tile.k.shape[3]], dv


def _blocks(q: Tensor, k: Tensor, band: Band) -> tuple[SubTile, ...]:
    """The tile in blocks of rows; whole if every row sees every key, and so the nearest ones."""
    rows, keys = q.shape[1], k.shape[1]
    max_rows = BLOCK_ROWS[q.dtype] if band.within(rows, keys).edges else rows
    return row_blocks(rows, keys, band, max_rows)


def _extended_spec(spec: KernelSpec) -> KernelSpec:
    """The spec of the kernel inside, which gets longer queries and keys instead of ALiBi."""
    dims = spec.head_dim + EXTRA_DIMS[spec.dtype], spec.value_dim or spec.head_dim
    return replace(spec, head_dim=dims[0], value_dim=dims[1], alibi=False)


def _append_distances(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """q (b, i, h, d + n), k (b, j, g, d + n), and slope (i - z) as (h, i) float64."""
    assert scores.slopes is not None and scores.rows is not None and scores.keys is not None
    slopes = scores.slopes.double()
    last = scores.keys.max()
    head_factors, key_factors = _factors(-slopes / scores.scale, last - scores.keys, q.dtype)
    q = torch.cat((q, head_factors.expand(*q.shape[:3], -1)), -1)
    k = torch.cat((k, key_factors[:, None].expand(*k.shape[:3], -1)), -1)
    return q, k, slopes[:, None] * (scores.rows - last)


def _factors(weights: Tensor, distances: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors A (h, n) and B (j, n) in `dtype` with A B^T = weights (h, 1) distances (1, j)."""
    terms, digits = [weights.to(dtype)], [distances]
    if dtype == torch.bfloat16:
        terms, digits = [], []
        for exponent in range(NUM_DIGITS):
            terms += _as_sum(weights * DIGIT_BASE**exponent, dtype)
            digits += [distances // DIGIT_BASE**exponent % DIGIT_BASE] * NUM_TERMS
    zeros = EXTRA_DIMS[dtype] - len(terms)
    head_factors, key_factors = torch.stack(terms, -1), torch.stack(digits, -1).to(dtype)
    return pad(head_factors, (0, zeros)), pad(key_factors, (0, zeros))


def _as_sum(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """NUM_TERMS tensors of `dtype` whose sum is x, rounded to the last one's precision."""
    terms: list[Tensor] = []
    for _ in range(NUM_TERMS):
        terms.append(x.to(dtype))
        x = x - terms[-1].to(x.dtype)
    return terms
