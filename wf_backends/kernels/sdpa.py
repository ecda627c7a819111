"""torch's own kernels, by the aten operators that return lse: on CUDA those of `sdpa_cuda` in 16
bits, on CPUs and in float32 those of `sdpa_masked`.

F.scaled_dot_product_attention returns no lse, and its backward takes the lse of its own keys alone.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators, SplitKernel
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    KernelSpec,
    flash_refuses,
    lacks,
    torch_release,
)
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.sdpa_cuda import CUDNN_MULTIPLE, CudaTile, choose, cuda_tile, machine
from wf_backends.kernels.sdpa_masked import CPU, EFFICIENT, masked_operators
from wf_backends.schedule import FULL, Band

_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, *FLASH_DTYPES),
}
_MIN_RELEASE_FOR_GQA_ON_CPU = (2, 9)
"""Earlier releases of torch read and write out of bounds in the CPU kernel if there are fewer key
heads than query heads."""


_CPU_WITHOUT_MASK = masked_operators("cpu", CPU)
_EFFICIENT_WITHOUT_MASK = masked_operators("efficient", EFFICIENT)


def operators_for(q: Tensor, k: Tensor, band: Band) -> Operators:
    """The operators for the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""
    if q.is_cuda and q.dtype != torch.float32:
        return choose(cuda_tile(machine(q.device), q, k, band))[0]
    needs_mask = band.left != inf and band.right != inf  # see split_causal
    if q.is_cuda:
        return masked_operators("efficient", EFFICIENT) if needs_mask else _EFFICIENT_WITHOUT_MASK
    return masked_operators("cpu", CPU) if needs_mask else _CPU_WITHOUT_MASK


def full_tile_operators(spec: KernelSpec) -> tuple[Operators, str]:
    """What `choose` gives a full tile of `spec` on CUDA."""
    gpu, rows = machine(torch.device(spec.device)), CUDNN_MULTIPLE
    return choose(CudaTile(gpu, spec.dtype, spec.max_head_dim, spec.heads, rows, rows, FULL))


class SdpaKernel(SplitKernel):
    """The Kernel protocol on the operators behind torch's scaled_dot_product_attention.

    On a CPU it takes float64, float32, bfloat16 and float16; on CUDA all of these but float64.

    Args:
        operators_for: chooses the operators for a tile (q, k, band).
    """

    name = "sdpa"

    def __init__(
        self, operators_for: Callable[[Tensor, Tensor, Band], Operators] = operators_for
    ) -> None:
        self._operators_for = operators_for

    def refuses(self, spec: KernelSpec) -> str | None:
        """What torch's flash kernels lack; see Kernel.refuses."""
        dtypes = _DTYPES.get(spec.device)
        if dtypes is None:
            return f"torch has flash kernels that return lse on cpu and cuda, not on {spec.device}"
        if spec.dtype not in dtypes:
            names = ", ".join(map(str, dtypes))
            return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"
        if refusal := lacks(spec, "torch's flash kernels"):
            return refusal
        if spec.device == "cuda":
            if spec.dtype == torch.float32 and torch.version.hip:
                return "torch's memory-efficient kernel has not been tried on ROCm"
            return flash_refuses(spec)
        if spec.kv_heads == spec.heads or torch_release() >= _MIN_RELEASE_FOR_GQA_ON_CPU:
            return None
        versions = _MIN_RELEASE_FOR_GQA_ON_CPU, torch_release()
        needed, installed = (".".join(map(str, version)) for version in versions)
        return f"on cpu torch's takes grouped key heads from {needed} on, this is {installed}"

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs; on CUDA, where each tile has its own choice, that of a full tile."""
        if spec.device != "cuda":
            return f"torch's flash operators for {spec.device}"
        if spec.dtype == torch.float32:
            return "torch's memory-efficient operators"
        return f"torch's operators for full tiles: {full_tile_operators(spec)[1]}"

    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """See SplitKernel.operators."""
        return self._operators_for(q, k, band)
