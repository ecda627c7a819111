"""A whole tile on torch's cuDNN attention for CUDA: full, or square and causal.

The backward wants the lse of the whole row and computes delta from out and dout, as flash-attn's
does, so the executor's stand-in for out serves it as well.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
Source: aten/src/ATen/native/cudnn/MHA.cpp and transformers/cuda/attention_backward.cu of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import effective
from wf_backends.schedule import CAUSAL, FULL, Band


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A full or square causal tile; see Kernel.forward."""
    causal, (q, k, v) = _is_causal(q, k, band), (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scores.scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)  # (b, h, i, 1), packed


def cudnn_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A full or square causal tile; see Kernel.backward, but for delta.

    torch keeps one compiled graph for each layout of q, k and v, and not every release looks at
    the layouts of out, dout and lse before it uses one again. So they always arrive as torch
    itself would have made them: out and dout laid out like q, lse packed, without a gap.
    """
    causal = _is_causal(tile.q, tile.k, band)
    *tensors, lse, _ = tile
    dout, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    dout, out = _laid_out_like(q, dout), _laid_out_like(q, out)
    lse = torch.empty((*lse.shape, 1), dtype=lse.dtype, device=lse.device).copy_(lse[..., None])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    lengths = None, None, None, q.shape[2], k.shape[2]
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, q, k, v, out, lse, seed, seed, *lengths, 0.0, causal, scale=scores.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _is_causal(q: Tensor, k: Tensor, band: Band) -> bool:
    """The operator's word for the band of a tile that `sdpa_choice` gave to cuDNN."""
    shown = effective(q.shape[1], k.shape[1], band)
    assert shown == FULL or (shown == CAUSAL and q.shape[1] == k.shape[1]), (q.shape, k.shape, band)
    return shown == CAUSAL


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x (b, h, i, d) in the memory order in which torch allocates the output for q.

    Strides of dimensions of size 1 are set without a copy.
    """
    wanted = torch.empty_like(q, device="meta").stride()
    dims = zip(x.shape, x.stride(), wanted, strict=True)
    if all(size == 1 or stride == like for size, stride, like in dims):
        return x.as_strided(x.shape, wanted)
    return torch.empty_like(q).copy_(x)
