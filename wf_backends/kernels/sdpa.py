"""torch's own flash kernels, through the aten operators that return lse.

The public F.scaled_dot_product_attention returns no lse, and its backward knows only its own rows'.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from wf_backends.kernels.pieces import Piece, cut_causal, cut_window
from wf_backends.kernels.piecewise import piecewise_backward, piecewise_forward
from wf_backends.kernels.protocol import KernelSpec
from wf_backends.kernels.sdpa_cpu import additive_mask, cpu_backward, cpu_forward
from wf_backends.kernels.sdpa_cuda import cuda_backward, cuda_forward
from wf_backends.mask import Band

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_HEAD_DIM = 256


class SdpaKernel:
    """The Kernel protocol on the operators behind torch's scaled_dot_product_attention.

    On a CPU it takes float64, float32, bfloat16 and float16; on CUDA bfloat16 and float16.
    """

    name = "sdpa"

    def refuses(self, spec: KernelSpec) -> str | None:
        """What torch's flash kernels lack; see Kernel.refuses."""
        if spec.device == "cpu":
            return None if spec.dtype in _CPU_DTYPES else _takes(_CPU_DTYPES, spec)
        if spec.device != "cuda":
            return f"torch has flash kernels that return lse on cpu and cuda, not on {spec.device}"
        if spec.dtype not in _CUDA_DTYPES:
            return _takes(_CUDA_DTYPES, spec)
        if spec.head_dim % 8 or spec.head_dim > _CUDA_HEAD_DIM:
            return f"head_dim must be a multiple of 8 up to {_CUDA_HEAD_DIM}, got {spec.head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        run = cuda_forward if q.is_cuda else partial(cpu_forward, cache(additive_mask))
        return piecewise_forward(run, _pieces(q, k, band), q, k, v, scale)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel.backward; the operators compute delta again, from dout and out."""
        run = cuda_backward if q.is_cuda else partial(cpu_backward, cache(additive_mask))
        return piecewise_backward(run, _pieces(q, k, band), dout, q, k, v, out, lse, scale)


def _takes(dtypes: tuple[torch.dtype, ...], spec: KernelSpec) -> str:
    names = ", ".join(str(dtype) for dtype in dtypes)
    return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"


def _pieces(q: Tensor, k: Tensor, band: Band) -> tuple[Piece, ...]:
    cut = cut_window if q.is_cuda else cut_causal
    return cut(q.shape[1], k.shape[1], band)
