"""torch's own flash and cuDNN kernels, through the aten operators that return lse.

The public F.scaled_dot_product_attention returns no lse, and its backward knows only its own rows'.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    TileGrad,
    flash_refuses,
    lacks,
    torch_release,
)
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.sdpa_choice import CUDNN_MULTIPLE, CudaTile, choose, cuda_tile, machine
from wf_backends.kernels.sdpa_cpu import cpu_operators
from wf_backends.kernels.split_run import Operators, OperatorsFor, split_backward, split_forward
from wf_backends.schedule import FULL, Band

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_GROUPS_ON_CPU = (2, 9)
"""The torch release from which its kernel for CPUs takes fewer key heads than query heads. Those
before read and write beyond the tensors' ends."""

_CPU = cpu_operators()  # for tiles that need no mask


def operators_for(q: Tensor, k: Tensor, band: Band) -> Operators:
    """What computes the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""
    if q.is_cuda:
        return choose(cuda_tile(machine(q.device), q, k, band))[0]
    return _CPU if inf in (band.left, band.right) else cpu_operators()


class SdpaKernel:
    """The Kernel protocol on the operators behind torch's scaled_dot_product_attention.

    On a CPU it takes float64, float32, bfloat16 and float16; on CUDA bfloat16 and float16.

    Args:
        release: of torch; None = the one that is installed.
    """

    name = "sdpa"

    def __init__(
        self,
        operators_for: OperatorsFor = operators_for,
        release: tuple[int, int] | None = None,
    ) -> None:
        self._operators_for, self._release = operators_for, release or torch_release()

    def refuses(self, spec: KernelSpec) -> str | None:
        """What torch's flash kernels lack; see Kernel.refuses."""
        takes = {"cpu": _CPU_DTYPES, "cuda": FLASH_DTYPES}.get(spec.device)
        if takes is None:
            return f"torch has flash kernels that return lse on cpu and cuda, not on {spec.device}"
        if spec.dtype not in takes:
            names = ", ".join(map(str, takes))
            return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"
        if lacking := lacks(spec, "torch's flash kernels"):
            return lacking
        if spec.device == "cuda":
            return flash_refuses(spec)
        if spec.kv_heads != spec.heads and self._release < _GROUPS_ON_CPU:
            since, here = (".".join(map(str, r)) for r in (_GROUPS_ON_CPU, self._release))
            return f"on cpu torch's takes grouped key heads from {since} on, this is {here}"
        return None

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs; on CUDA the choice is made for each tile."""
        if spec.device != "cuda":
            return f"torch's flash operators for {spec.device}"
        best = CudaTile(machine(), spec.dtype, spec.widest, CUDNN_MULTIPLE, CUDNN_MULTIPLE, FULL)
        return f"torch's operators for full tiles: {choose(best)[1]}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        return split_forward(self._operators_for, q, k, v, scores, band)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward; the operators compute delta again, from dout and out."""
        return split_backward(self._operators_for, tile, scores, band)
