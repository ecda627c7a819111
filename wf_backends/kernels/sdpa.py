"""torch's own kernels, through the aten operators that return lse: flash on CPUs; on CUDA see
`sdpa_cuda`.

The public F.scaled_dot_product_attention returns no lse, and its backward knows only its own rows'.

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

MaskOf = Callable[[int, int, Band, torch.dtype], Tensor]

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_GROUPS_ON_CPU = (2, 9)
"""The torch release from which its kernel for CPUs takes fewer key heads than query heads. Those
before read and write beyond the tensors' ends."""


def cpu_operators() -> Operators:
    """torch's CPU operators for one tile; all blocks of its window share one mask."""
    mask_of = cache(additive_mask)
    there, back = partial(cpu_forward, mask_of), partial(cpu_backward, mask_of)
    return Operators("cpu", split_causal, there, back)


def cpu_forward(
    mask_of: MaskOf, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A sub-tile of `split_causal`; see Kernel.forward. Causal is from the top left here."""
    mask, causal = None, band is CAUSAL or band == CAUSAL
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            out, lse = cpu_forward(mask_of, q.flip(1), k.flip(1), v.flip(1), scores, CAUSAL)
            return out.flip(1), lse.flip(2)
        mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    return out.transpose(1, 2), lse


def cpu_backward(mask_of: MaskOf, tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_causal`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    mask, causal = None, band is CAUSAL or band == CAUSAL
    if not causal and band is not FULL and band != FULL:
        if is_reversed(band):
            dq, dk, dv = cpu_backward(mask_of, tile.reversed(), scores, CAUSAL)
            return dq.flip(1), dk.flip(1), dv.flip(1)
        mask = mask_of(q.shape[1], k.shape[1], band, q.dtype)
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


_CPU = cpu_operators()  # for tiles that need no mask


def operators_for(q: Tensor, k: Tensor, band: Band) -> Operators:
    """What computes the tile of q (b, i, h, d) and k (b, j, g, d) under `band`."""
    if q.is_cuda:
        return choose(cuda_tile(machine(q.device), q, k, band))[0]
    return _CPU if inf in (band.left, band.right) else cpu_operators()


class SdpaKernel(SplitKernel):
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
        on, rows = machine(torch.device(spec.device)), CUDNN_MULTIPLE
        best = CudaTile(on, spec.dtype, spec.widest, rows, rows, FULL)
        return f"torch's operators for full tiles: {choose(best)[1]}"

    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """See SplitKernel.operators."""
        return self._operators_for(q, k, band)
