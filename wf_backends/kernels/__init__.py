"""Attention of one tile, one file a kernel."""

from wf_backends.kernels.protocol import Kernel, KernelSpec
from wf_backends.kernels.select import Selection, select

__all__ = ["Kernel", "KernelSpec", "Selection", "select"]
