"""torch's own flash kernels, through the aten operators that return lse.

The public F.scaled_dot_product_attention returns no lse, and its backward knows only its own rows'.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.pieces import Piece, cut_causal, cut_window, flash_window, is_reversed
from wf_backends.kernels.piecewise import piecewise_backward, piecewise_forward
from wf_backends.kernels.protocol import KernelSpec
from wf_backends.kernels.reference import band_mask
from wf_backends.mask import CAUSAL, FULL, Band

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_HEAD_DIM = 256

MaskOf = Callable[[int, int, Band, torch.dtype], Tensor]


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
        run = _cuda_forward if q.is_cuda else partial(_cpu_forward, cache(_additive_mask))
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
        run = _cuda_backward if q.is_cuda else partial(_cpu_backward, cache(_additive_mask))
        return piecewise_backward(run, _pieces(q, k, band), dout, q, k, v, out, lse, scale)


def _takes(dtypes: tuple[torch.dtype, ...], spec: KernelSpec) -> str:
    names = ", ".join(str(dtype) for dtype in dtypes)
    return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"


def _pieces(q: Tensor, k: Tensor, band: Band) -> tuple[Piece, ...]:
    cut = cut_window if q.is_cuda else cut_causal
    return cut(q.shape[1], k.shape[1], band)


def _cpu_forward(
    mask_of: MaskOf, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """A piece of `cut_causal` on the CPU operator, which is causal from the top left."""
    if is_reversed(band):
        out, lse = _cpu_forward(mask_of, q.flip(1), k.flip(1), v.flip(1), scale, CAUSAL)
        return out.flip(1), lse.flip(2)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, **_cpu_options(mask_of, q, k, scale, band)
    )
    return out.transpose(1, 2), lse


def _cpu_backward(
    mask_of: MaskOf,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `_cpu_forward`."""
    if is_reversed(band):
        dout, q, k, v, out = (x.flip(1) for x in (dout, q, k, v, out))
        grads = _cpu_backward(mask_of, dout, q, k, v, out, lse.flip(2), scale, CAUSAL)
        dq, dk, dv = (x.flip(1) for x in grads)
        return dq, dk, dv
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
        lse,
        0.0,
        **_cpu_options(mask_of, q, k, scale, band),
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cpu_options(
    mask_of: MaskOf, q: Tensor, k: Tensor, scale: float, band: Band
) -> dict[str, object]:
    """The operator's words for a band."""
    if band in (FULL, CAUSAL):
        return {"is_causal": band == CAUSAL, "scale": scale}
    mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
    return {"is_causal": False, "attn_mask": mask, "scale": scale}


def _additive_mask(rows: int, keys: int, band: Band, dtype: torch.dtype) -> Tensor:
    """(1, 1, rows, keys): 0 where the row sees the key, -inf elsewhere."""
    seen = band_mask(rows, keys, band, torch.device("cpu"))
    return torch.zeros(1, 1, rows, keys, dtype=dtype).masked_fill(~seen, -inf)


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """A piece of `cut_window` on torch's copy of flash-attn 2.

    If `torch.nn.attention.activate_flash_attention_impl` has put flash-attn 3 or 4 behind the
    operator, this runs that. Only the first two results are used: the others, whose meaning
    changed in torch 2.7, belong to dropout and debugging.
    """
    left, right = flash_window(band, q.shape[1], k.shape[1])
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `_cuda_forward`."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward.default(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),  # the operator reads it as (b, h, i), whatever its strides
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        False,
        no_dropout,
        no_dropout[0],
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
