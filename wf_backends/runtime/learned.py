"""The parameters that take part in attention itself, beside queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wf_backends.schedule import Range


class Learned(NamedTuple):
    """Parameters that take part in attention. Of their gradients a rank computes a part."""

    sinks: Tensor | None = None
    """(h,)."""
    up: Tensor | None = None
    """(h, n + e, c): k and v are latents, see `LatentKernel`."""
    bias: Tensor | None = None
    """(h, 2 n - 1), see `PositionBias`."""

    def of_heads(self, heads: Range) -> Learned:
        """Those of some of the heads."""
        return Learned(*(None if x is None else x[slice(*heads)] for x in self))
