"""The parameters that take part in attention itself, beside queries, keys and values.

Sinks are folded in once, at home, when a row has met all of its keys; tiles know nothing of them.
In the backward the tiles are given the lse and delta of the row with its sink. Latents are in
runtime/latents.py, the bias by distance in kernels/scores.py.

Shapes: s rows of this rank, b batch, h query heads, d head_dim.
Source: sinks as in gpt-oss (arXiv 2508.10925, section 2.2); arXiv 2309.17453.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends.schedule import Range


class Learned(NamedTuple):
    """Parameters that take part in attention. Of their gradients a rank computes a part."""

    sinks: Tensor | None = None
    """(h,): logits that take part in the softmax and have no value."""
    up: Tensor | None = None
    """(h, n + e, c): k and v are latents, see `LatentKernel`."""
    bias: Tensor | None = None
    """(h, 2 n - 1), see `PositionBias`."""

    def of_heads(self, heads: Range) -> Learned:
        """Those of some of the heads."""
        return Learned(*(None if x is None else x[slice(*heads)] for x in self))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that have met all of their keys, with their head's sink.

        lse' = log(exp(lse) + exp(sink));  out' = exp(lse - lse') out

    Args:
        out: (s, b, h, d), 0 where a row sees nothing. lse: (s, b, h), -inf there. sinks: (h,).
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - merged).unsqueeze(-1), merged


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(h,), sinks' dtype: the part of the gradient that these rows have.

        ds = -sum exp(sink - lse') delta'

    Args:
        lse: (s, b, h), as `with_sinks` gives it. delta: (b, s, h), rowsum(dout * out').
    """
    shares = torch.exp(sinks.to(lse.dtype) - lse) * delta.transpose(0, 1)
    return -shares.sum((0, 1)).to(sinks.dtype)
