"""torch's own kernels, by the aten operators that return lse. For CUDA see `sdpa_cuda`.

F.scaled_dot_product_attention returns no lse, and its backward takes the lse of its own keys alone.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators, SplitKernel
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    TileGrad,
    flash_refuses,
    lacks,
    torch_release,
)
from wf_backends.kernels.reference import band_mask
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.sdpa_cuda import CUDNN_MULTIPLE, CudaTile, choose, cuda_tile, machine
from wf_backends.kernels.tile_split import is_reversed, split_causal
from wf_backends.schedule import CAUSAL, FULL, Band

MakeMask = Callable[[int, int, Band, torch.dtype], Tensor]
"""(rows, keys, band, dtype) -> additive mask."""

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MIN_RELEASE_FOR_GQA_ON_CPU = (2, 9)
"""Earlier releases of torch read and write out of bounds in the CPU kernel if there are fewer key
heads than query heads."""


def cpu_operators() -> Operators:
    """torch's CPU operators for one tile; the blocks of a window of the same shape share a mask."""
    make_mask = cache(additive_mask)
    forward, backward = partial(cpu_forward, make_mask), partial(cpu_backward, make_mask)
    return Operators("cpu", split_causal, forward, backward)


def cpu_forward(
    make_mask: MakeMask, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A sub-tile of `split_causal`; see Kernel.forward. Causal counts from the top left."""
    mask = None
    causal = band is CAUSAL or band == CAUSAL  # `is` first: it costs no call
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            out, lse = cpu_forward(make_mask, q.flip(1), k.flip(1), v.flip(1), scores, CAUSAL)
            return out.flip(1), lse.flip(2)
        mask = make_mask(q.shape[1], k.shape[1], band, q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    return out.transpose(1, 2), lse


def cpu_backward(make_mask: MakeMask, tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_causal`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    mask = None
    causal = band is CAUSAL or band == CAUSAL
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            dq, dk, dv = cpu_backward(make_mask, tile.reversed(), scores, CAUSAL)
            return dq.flip(1), dk.flip(1), dv.flip(1)
        mask = make_mask(q.shape[1], k.shape[1], band, q.dtype)
    dout, out, q = dout.transpose(1, 2), out.transpose(1, 2), q.transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def additive_mask(rows: int, keys: int, band: Band, dtype: torch.dtype) -> Tensor:
    """(1, 1, rows, keys): 0 where the row sees the key, -inf elsewhere."""
    seen = band_mask(rows, keys, band, torch.device("cpu"))
    return torch.zeros(1, 1, rows, keys, dtype=dtype).masked_fill(~seen, -inf)


_CPU_WITHOUT_MASK = cpu_operators()


def operators_for(q: Tensor, k: Tensor, band: Band) -> Operators:
    """The operators for the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""
    if q.is_cuda:
        return choose(cuda_tile(machine(q.device), q, k, band))[0]
    needs_mask = band.left != inf and band.right != inf  # see split_causal
    return cpu_operators() if needs_mask else _CPU_WITHOUT_MASK


def full_tile_operators(spec: KernelSpec) -> tuple[Operators, str]:
    """What `choose` gives a full tile of `spec` on CUDA."""
    gpu, rows = machine(torch.device(spec.device)), CUDNN_MULTIPLE
    return choose(CudaTile(gpu, spec.dtype, spec.max_head_dim, spec.heads, rows, rows, FULL))


class SdpaKernel(SplitKernel):
    """The Kernel protocol on the operators behind torch's scaled_dot_product_attention.

    On a CPU it takes float64, float32, bfloat16 and float16; on CUDA bfloat16 and float16.

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
        dtypes = {"cpu": _CPU_DTYPES, "cuda": FLASH_DTYPES}.get(spec.device)
        if dtypes is None:
            return f"torch has flash kernels that return lse on cpu and cuda, not on {spec.device}"
        if spec.dtype not in dtypes:
            names = ", ".join(map(str, dtypes))
            return f"torch's flash kernels on {spec.device} take {names}, got {spec.dtype}"
        if refusal := lacks(spec, "torch's flash kernels"):
            return refusal
        if spec.device == "cuda":
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
        return f"torch's operators for full tiles: {full_tile_operators(spec)[1]}"

    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """See SplitKernel.operators."""
        return self._operators_for(q, k, band)
