"""A sub-tile on torch's flash kernel for CPUs.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.reference import band_mask
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.split_run import Operators
from wf_backends.kernels.tile_split import is_reversed, split_causal
from wf_backends.schedule import CAUSAL, FULL, Band

MaskOf = Callable[[int, int, Band, torch.dtype], Tensor]


def cpu_operators() -> Operators:
    """torch's CPU operators for one tile; all blocks of its window share one mask."""
    mask_of = cache(additive_mask)
    there, back = partial(cpu_forward, mask_of), partial(cpu_backward, mask_of)
    return Operators("cpu", split_causal, there, back)


def cpu_forward(
    mask_of: MaskOf, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A sub-tile of `split_causal`; see Kernel.forward. Causal is from the top left here."""
    mask, causal = None, band is CAUSAL or band == CAUSAL
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            out, lse = cpu_forward(mask_of, q.flip(1), k.flip(1), v.flip(1), scores, CAUSAL)
            return out.flip(1), lse.flip(2)
        mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    return out.transpose(1, 2), lse


def cpu_backward(mask_of: MaskOf, tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_causal`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    mask, causal = None, band is CAUSAL or band == CAUSAL
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            dq, dk, dv = cpu_backward(mask_of, tile.reversed(), scores, CAUSAL)
            return dq.flip(1), dk.flip(1), dv.flip(1)
        mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
    dout, out, q = dout.transpose(1, 2), out.transpose(1, 2), q.transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def additive_mask(rows: int, keys: int, band: Band, dtype: torch.dtype) -> Tensor:
    """(1, 1, rows, keys): 0 where the row sees the key, -inf elsewhere."""
    seen = band_mask(rows, keys, band, torch.device("cpu"))
    return torch.zeros(1, 1, rows, keys, dtype=dtype).masked_fill(~seen, -inf)
