"""A sub-tile on torch's flash kernel for CUDA: its copy of flash-attn 2.

If `torch.nn.attention.activate_flash_attention_impl` has put flash-attn 3 or 4 behind the
operators, this runs those.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import flash_window
from wf_backends.schedule import Band


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A sub-tile of `split_window`; see Kernel.forward.

    Only the first two results are used: the others, whose meaning changed in torch 2.7, belong to
    dropout and debugging.
    """
    rows, keys, options = q.shape[1], k.shape[1], _options(q, k, scores, band)
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, None, None, rows, keys, 0.0, False, False, **options
    )
    return out, lse


def cuda_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_window`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    rows, keys, options = q.shape[1], k.shape[1], _options(q, k, scores, band)
    lse = lse.contiguous()  # the operator reads it as (b, h, i), whatever its strides
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    given = dout, q, k, v, out, lse, None, None, rows, keys, 0.0, False, seed, seed[0]
    return torch.ops.aten._flash_attention_backward.default(*given, **options)


def _options(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    left, right = flash_window(band, q.shape[1], k.shape[1])
    return {"scale": scores.scale, "window_size_left": left, "window_size_right": right}
