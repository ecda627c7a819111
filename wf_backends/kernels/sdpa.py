"""torch's own flash and cuDNN kernels, through the aten operators that return lse.

The public F.scaled_dot_product_attention returns no lse, and its backward knows only its own rows'.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.protocol import (
    Grads,
    KernelSpec,
    TileGrad,
    too_old_for_flash,
    torch_release,
)
from wf_backends.kernels.sdpa_choice import CUDNN_MULTIPLE, Question, choose, machine, question
from wf_backends.kernels.sdpa_cpu import MaskOf, additive_mask, cpu_backward, cpu_forward
from wf_backends.kernels.split_run import Operators, piecewise_backward, piecewise_forward
from wf_backends.kernels.tile_split import Piece, cut_causal, split_keys, whole
from wf_backends.schedule import FULL, Band

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_HEAD_DIM = 256
_GROUPS_ON_CPU = (2, 9)
"""The torch release from which its kernel for CPUs takes fewer key heads than query heads. Those
before read and write beyond the tensors' ends."""


def operators_for(q: Tensor, k: Tensor, band: Band) -> Operators:
    """What computes the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""
    if q.is_cuda:
        return choose(question(machine(q.device), q, k, band)).operators
    if inf in (band.left, band.right):
        return _CPU
    return _cpu(cache(additive_mask))


def _cpu(mask_of: MaskOf) -> Operators:
    there, back = partial(cpu_forward, mask_of), partial(cpu_backward, mask_of)
    return Operators("cpu", cut_causal, there, back)


_CPU = _cpu(additive_mask)  # for tiles that need no mask


class SdpaKernel:
    """The Kernel protocol on the operators behind torch's scaled_dot_product_attention.

    On a CPU it takes float64, float32, bfloat16 and float16; on CUDA bfloat16 and float16.

    Args:
        release: of torch; None = the one that is installed.
    """

    name = "sdpa"

    def __init__(
        self,
        operators_for: Callable[[Tensor, Tensor, Band], Operators] = operators_for,
        release: tuple[int, int] | None = None,
    ) -> None:
        self._operators_for, self._release = operators_for, release or torch_release()

    def refuses(self, spec: KernelSpec) -> str | None:
        """What torch's flash kernels lack; see Kernel.refuses."""
        if spec.device == "cpu":
            return self._refuses_on_cpu(spec)
        if spec.device != "cuda":
            return f"torch has flash kernels that return lse on cpu and cuda, not on {spec.device}"
        if spec.dtype not in _CUDA_DTYPES:
            return _takes(_CUDA_DTYPES, spec)
        if spec.head_dim % 8 or spec.head_dim > _CUDA_HEAD_DIM:
            return f"head_dim must be a multiple of 8 up to {_CUDA_HEAD_DIM}, got {spec.head_dim}"
        return too_old_for_flash()

    def _refuses_on_cpu(self, spec: KernelSpec) -> str | None:
        if spec.dtype not in _CPU_DTYPES:
            return _takes(_CPU_DTYPES, spec)
        if spec.kv_heads != spec.heads and self._release < _GROUPS_ON_CPU:
            since, here = (".".join(map(str, r)) for r in (_GROUPS_ON_CPU, self._release))
            return f"on cpu torch's takes grouped key heads from {since} on, this is {here}"
        return None

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs; on CUDA the choice is made for each tile."""
        if spec.device != "cuda":
            return f"torch's flash operators for {spec.device}"
        best = Question(machine(), spec.dtype, spec.head_dim, CUDNN_MULTIPLE, CUDNN_MULTIPLE, FULL)
        return f"torch's operators for full tiles: {choose(best).reason}"

    def split(self, rows: int, keys: int, band: Band, device: torch.device) -> tuple[Piece, ...]:
        """Uncut on CUDA; see Kernel.split."""
        return (split_keys if device.type == "cpu" else whole)(rows, keys, band)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        run = self._operators_for(q, k, band)
        pieces = run.cut(q.shape[1], k.shape[1], band)
        return piecewise_forward(run.forward, pieces, q, k, v, scale)

    def backward(self, tile: TileGrad, scale: float, band: Band) -> Grads:
        """See Kernel.backward; the operators compute delta again, from dout and out."""
        run = self._operators_for(tile.q, tile.k, band)
        pieces = run.cut(tile.q.shape[1], tile.k.shape[1], band)
        return piecewise_backward(run.backward, pieces, tile, scale)


def _takes(dtypes: tuple[torch.dtype, ...], spec: KernelSpec) -> str:
    names = ", ".join(str(dtype) for dtype in dtypes)
    return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"
