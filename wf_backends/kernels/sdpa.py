"""torch's own kernels, by the aten operators that return lse. For CUDA in 16 bits see `sdpa_cuda`.

On CPUs, and in float32 on CUDA, they are causal from the top left, or take a mask.

F.scaled_dot_product_attention returns no lse, and its backward takes the lse of its own keys alone.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
Source: aten/src/ATen/native/transformers/attention.cpp and cuda/attention.cu of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.kernels.merge import Operators, SplitKernel
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    OutLse,
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

_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, *FLASH_DTYPES),
}
_MIN_RELEASE_FOR_GQA_ON_CPU = (2, 9)
"""Earlier releases of torch read and write out of bounds in the CPU kernel if there are fewer key
heads than query heads."""
LSE_MULTIPLE = 32  # of rows, in the lse of torch's memory-efficient kernel
MASK_MULTIPLE = 8  # of elements, between the rows of a mask for it


class AtenOperators(NamedTuple):
    """Two operators of torch on heads-first tensors: q (b, h, i, d), k and v (b, g, j, d).

    mask is an additive mask (1, 1, i, j) or None; causal counts from the top left.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], OutLse]
    """(q, k, v, mask, causal, scale) -> out (b, h, i, d), lse (b, h, i)."""
    backward: Callable[[Sequence[Tensor], Tensor | None, bool, float], Grads]
    """((dout, q, k, v, out, lse), mask, causal, scale) -> dq, dk, dv. It computes delta again."""


class MaskedTiles:
    """Kernel.forward and Kernel.backward for the sub-tiles of one tile, which share masks."""

    def __init__(self, attention: AtenOperators) -> None:
        self._attention, self._make_mask = attention, cache(additive_mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        if band.left != inf and is_reversed(band):  # the first costs no call
            out, lse = self.forward(q.flip(1), k.flip(1), v.flip(1), scores, CAUSAL)
            return out.flip(1), lse.flip(2)
        mask, causal = self._mask(q, k, band)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = self._attention.forward(q, k, v, mask, causal, scores.scale)
        return out.transpose(1, 2), lse

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        if band.left != inf and is_reversed(band):
            dq, dk, dv = self.backward(tile.reversed(), scores, CAUSAL)
            return dq.flip(1), dk.flip(1), dv.flip(1)
        mask, causal = self._mask(tile.q, tile.k, band)
        tensors = [x.transpose(1, 2) for x in tile[:5]]  # all but lse and delta
        grads = self._attention.backward((*tensors, tile.lse), mask, causal, scores.scale)
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, band: Band) -> tuple[Tensor | None, bool]:
        """(mask or None, whether the operator's own causal mask is used)."""
        if band in (FULL, CAUSAL):
            return None, band == CAUSAL
        return self._make_mask(q.shape[1], k.shape[1], band, q.dtype, q.device), False


def masked_operators(name: str, attention: AtenOperators) -> Operators:
    """The operators for one tile."""
    tiles = MaskedTiles(attention)
    return Operators(name, split_causal, tiles.forward, tiles.backward)


def additive_mask(
    rows: int, keys: int, band: Band, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(1, 1, rows, keys): 0 where the row sees the key, else -inf; rows padded to MASK_MULTIPLE."""
    seen = band_mask(rows, keys, band, device)
    columns = keys + -keys % MASK_MULTIPLE
    mask = torch.zeros(1, 1, rows, columns, dtype=dtype, device=device)[..., :keys]
    return mask.masked_fill_(~seen, -inf)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> OutLse:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def _cpu_backward(
    tensors: Sequence[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> Grads:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *tensors, 0.0, causal, attn_mask=mask, scale=scale
    )


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> OutLse:
    k, v, mask = _for_all_heads(q, k, v, mask)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        q, k, v, mask, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    tensors: Sequence[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> Grads:
    dout, q, k, v, out, lse = tensors
    key_heads = k.shape[1]
    k, v, mask = _for_all_heads(q, k, v, mask)
    lse = pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # required, also without dropout
    wanted = [True, True, True, False]  # no gradient of the mask
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        dout, q, k, v, mask, out, lse, seed, seed, 0.0, wanted, causal, scale=scale
    )
    if key_heads < q.shape[1]:
        dk, dv = (x.unflatten(1, (key_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _for_all_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v and mask with the heads and samples of q: the operator has no grouped key heads."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return k, v, None if mask is None else mask.expand(*q.shape[:2], -1, -1)


CPU = AtenOperators(_cpu_forward, _cpu_backward)
EFFICIENT = AtenOperators(_efficient_forward, _efficient_backward)
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
        self.operators = operators_for

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
