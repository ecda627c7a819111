"""Folding one tile's attention into the running result of its rows.

Shapes: s rows, b batch, h heads, d head_dim; buffers are rows-first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's attention into (out, lse), in place.

        lse' = log(exp(lse) + exp(block_lse))
        out' = out + sigmoid(block_lse - lse) (block_out - out)

    Args:
        out: (s, b, h, d), float32 or float64. Running output, 0 where a row has met no key yet.
        lse: (s, b, h), same dtype, natural log, -inf where a row has met no key yet.
        block_out: (s, b, h, d), any float dtype. block_lse: (s, b, h), finite.

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
