"""The learned parameters of attention itself, beside queries, keys and values.

The owner of a row merges its sink once, when the row has met all of its keys; forward tiles ignore
sinks. Backward tiles get the row's lse and delta with its sink. For latents see
runtime/latents.py, for the bias by distance kernels/scores.py.

Shapes: s rows of this rank, b batch, h query heads, d head_dim.
Source: sinks as in gpt-oss (arXiv 2508.10925, section 2.2); arXiv 2309.17453.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends.schedule import Range


class Learned(NamedTuple):
    """Learned parameters of attention, or this rank's addends of their gradients."""

    sinks: Tensor | None = None
    """(h,): logits that take part in the softmax and have no value."""
    up: Tensor | None = None
    """(h, n + e, c): k and v are latents, see `LatentKernel`."""
    bias: Tensor | None = None
    """(h, 2 n - 1), see `PositionBias`."""

    def of_heads(self, heads: Range) -> Learned:
        """The parameters of a range of the heads."""
        return Learned(*(None if x is None else x[slice(*heads)] for x in self))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the sinks into the (out, lse) of rows that have met all of their keys.

        lse' = log(exp(lse) + exp(sink));  out' = exp(lse - lse') out

    Args:
        out: (s, b, h, d), 0 where a row sees no key. lse: (s, b, h), -inf there. sinks: (h,).
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    merged = merged.masked_fill(merged == -inf, 0.0)  # no key, and a sink of -inf: out' = 0
    return out * torch.exp(lse - merged).unsqueeze(-1), merged


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(h,), sinks' dtype: the gradient of the sinks, summed over these rows.

        ds = -sum exp(sink - lse') delta'

    Args:
        lse: (s, b, h), lse' of `with_sinks`. delta: (b, s, h), rowsum(dout * out').
    """
    addends = torch.exp(sinks.to(lse.dtype) - lse) * delta.transpose(0, 1)
    return -addends.sum((0, 1)).to(sinks.dtype)
