"""A piece of a tile on torch's flash kernel for CPUs.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.halves import block_rows, halved_backward, halved_forward
from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.reference import band_mask
from wf_backends.kernels.tile_split import is_reversed
from wf_backends.schedule import CAUSAL, FULL, Band

MaskOf = Callable[[int, int, Band, torch.dtype], Tensor]
"""`additive_mask`, or a cache of it: all blocks of a window share one mask."""


def cpu_forward(
    mask_of: MaskOf, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """A piece of `cut_causal`; see Kernel.forward. The operator is causal from the top left."""
    if is_reversed(band):
        out, lse = cpu_forward(mask_of, q.flip(1), k.flip(1), v.flip(1), scale, CAUSAL)
        return out.flip(1), lse.flip(2)
    block = block_rows(q.shape[1], k.shape[1], q.dtype)
    if band == CAUSAL and block < q.shape[1]:
        return halved_forward(partial(cpu_forward, mask_of), q, k, v, scale, block)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, **_options(mask_of, q, k, scale, band)
    )
    return out.transpose(1, 2), lse


def cpu_backward(mask_of: MaskOf, tile: TileGrad, scale: float, band: Band) -> Grads:
    """A piece of `cut_causal`; see Kernel.backward, but for delta, which the operator computes."""
    if is_reversed(band):
        dq, dk, dv = cpu_backward(mask_of, tile.reversed(), scale, CAUSAL)
        return dq.flip(1), dk.flip(1), dv.flip(1)
    dout, q, k, v, out, lse, _ = tile
    block = block_rows(q.shape[1], k.shape[1], q.dtype, backward=True)
    if band == CAUSAL and block < q.shape[1]:
        return halved_backward(partial(cpu_backward, mask_of), tile, scale, block)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
        lse,
        0.0,
        **_options(mask_of, q, k, scale, band),
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _options(mask_of: MaskOf, q: Tensor, k: Tensor, scale: float, band: Band) -> dict[str, object]:
    """The operator's words for a band."""
    if band in (FULL, CAUSAL):
        return {"is_causal": band == CAUSAL, "scale": scale}
    mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
    return {"is_causal": False, "attn_mask": mask, "scale": scale}


def additive_mask(rows: int, keys: int, band: Band, dtype: torch.dtype) -> Tensor:
    """(1, 1, rows, keys): 0 where the row sees the key, -inf elsewhere."""
    seen = band_mask(rows, keys, band, torch.device("cpu"))
    return torch.zeros(1, 1, rows, keys, dtype=dtype).masked_fill(~seen, -inf)
