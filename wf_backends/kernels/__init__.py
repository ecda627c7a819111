"""Attention of one tile: `reference`, `sdpa` (torch's own kernels), `flash` (flash-attn)."""

from wf_backends.kernels.protocol import Kernel, KernelSpec
from wf_backends.kernels.select import Selection, select

__all__ = ["Kernel", "KernelSpec", "Selection", "select"]
