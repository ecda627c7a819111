"""torch's operators for CUDA: its flash kernel, cuDNN's attention, and which computes a tile.

The flash kernel is torch's copy of flash-attn 2. If
`torch.nn.attention.activate_flash_attention_impl` has put flash-attn 3 or 4 behind its operators,
this runs those. What cuDNN needs is one table; `machine` is the one place that asks torch and the
GPU.

Both backwards want the lse of the whole row and compute delta from out and dout, so the executor's
stand-in for out serves them as well.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
Source: aten/src/ATen/native/cudnn/MHA.cpp and transformers/cuda/attention_backward.cu of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators
from wf_backends.kernels.protocol import FLASH_DTYPES, Grads, TileGrad, torch_release
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import effective, flash_window, split_window, whole
from wf_backends.schedule import CAUSAL, FULL, Band

CUDNN_MULTIPLE = 128
"""Rows and keys of a tile for cuDNN come in multiples of this: see docs/internals/kernels.md."""


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A sub-tile of `split_window`; see Kernel.forward.

    Only the first two results are used: the others, whose meaning changed in torch 2.7, belong to
    dropout and debugging.
    """
    rows, keys, options = q.shape[1], k.shape[1], _options(q, k, scores, band)
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, None, None, rows, keys, 0.0, False, False, **options
    )
    return out, lse


def cuda_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_window`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    rows, keys, options = q.shape[1], k.shape[1], _options(q, k, scores, band)
    lse = lse.contiguous()  # the operator reads it as (b, h, i), whatever its strides
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    given = dout, q, k, v, out, lse, None, None, rows, keys, 0.0, False, seed, seed[0]
    return torch.ops.aten._flash_attention_backward.default(*given, **options)


def _options(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    left, right = flash_window(band, q.shape[1], k.shape[1])
    return {"scale": scores.scale, "window_size_left": left, "window_size_right": right}


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """A full or square causal tile; see Kernel.forward."""
    causal, (q, k, v) = _is_causal(q, k, band), (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scores.scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)  # (b, h, i, 1), packed


def cudnn_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A full or square causal tile; see Kernel.backward, but for delta.

    torch keeps one compiled graph for each layout of q, k and v, and not every release looks at
    the layouts of out, dout and lse before it uses one again. So they always arrive as torch
    itself would have made them: out and dout laid out like q, lse packed, without a gap.
    """
    causal = _is_causal(tile.q, tile.k, band)
    *tensors, lse, _ = tile
    dout, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    dout, out = _laid_out_like(q, dout), _laid_out_like(q, out)
    lse = torch.empty((*lse.shape, 1), dtype=lse.dtype, device=lse.device).copy_(lse[..., None])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    lengths = None, None, None, q.shape[2], k.shape[2]
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, q, k, v, out, lse, seed, seed, *lengths, 0.0, causal, scale=scores.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _is_causal(q: Tensor, k: Tensor, band: Band) -> bool:
    """The operator's word for the band of a tile that `choose` gave to cuDNN."""
    shown = effective(q.shape[1], k.shape[1], band)
    assert shown == FULL or (shown == CAUSAL and q.shape[1] == k.shape[1]), (q.shape, k.shape, band)
    return shown == CAUSAL


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x (b, h, i, d) in the memory order in which torch allocates the output for q.

    Strides of dimensions of size 1 are set without a copy.
    """
    wanted = torch.empty_like(q, device="meta").stride()
    dims = zip(x.shape, x.stride(), wanted, strict=True)
    if all(size == 1 or stride == like for size, stride, like in dims):
        return x.as_strided(x.shape, wanted)
    return torch.empty_like(q).copy_(x)


CUDNN = Operators("cudnn", whole, cudnn_forward, cudnn_backward)
FLASH = Operators("flash", split_window, cuda_forward, cuda_backward)


@dataclass(frozen=True, slots=True)
class Machine:
    """What torch and one of its GPUs say about themselves."""

    torch: tuple[int, int]
    """Release, (2, 13) for 2.13.0."""
    cudnn: int
    """Version of the loaded library, 91501 for 9.15.1; 0 if torch has none."""
    capability: tuple[int, int]
    """Compute capability of the GPU, (9, 0) for a Hopper; (0, 0) if there is none."""
    enabled: bool
    """torch.backends.cuda.cudnn_sdp_enabled()."""
    deterministic: bool
    """Whether torch refuses operators that are not deterministic."""


@dataclass(frozen=True, slots=True)
class CudaTile:
    """A tile on a machine: all that the choice looks at."""

    machine: Machine
    dtype: torch.dtype
    head_dim: int
    rows: int
    keys: int
    band: Band


@lru_cache(maxsize=1024)  # asked for every tile
def choose(tile: CudaTile) -> tuple[Operators, str]:
    """The operators for a tile, and why these.

    cuDNN's if it lacks nothing, since it is faster; else flash, which takes every tile.
    """
    for holds, need, got in cudnn_needs(tile):
        if not holds:
            return FLASH, f"flash; not cudnn, which needs {need}, got {got}"
    return CUDNN, "cudnn"


def cudnn_needs(tile: CudaTile) -> Iterator[tuple[bool, str, str]]:
    """What cuDNN needs of a tile: (whether it is so, in words, what there is instead)."""
    on, head_dim, rows, keys = tile.machine, tile.head_dim, tile.rows, tile.keys
    gpus, shown = ((9, 0), (10, 0), (10, 3)), effective(rows, keys, tile.band)
    right_band = shown == FULL or (shown == CAUSAL and rows == keys)
    multiples = rows % CUDNN_MULTIPLE == 0 == keys % CUDNN_MULTIPLE
    size = f"rows {rows}, keys {keys}"
    yield on.torch >= (2, 11), "torch 2.11 or later", f"torch {on.torch}"
    yield on.cudnn >= 91501, "cuDNN 9.15.1 or later", f"cudnn {on.cudnn}"
    capability = "compute capability (9, 0), (10, 0) or (10, 3)"
    yield on.capability in gpus, capability, f"capability {on.capability}"
    yield on.enabled, "enable_cudnn_sdp(True)", f"enabled {on.enabled}"
    yield not on.deterministic, "use_deterministic_algorithms(False)", "deterministic True"
    yield tile.dtype in FLASH_DTYPES, "torch.bfloat16 or torch.float16", f"dtype {tile.dtype}"
    short = head_dim % 8 == 0 and head_dim <= 128
    yield short, "a head_dim that is a multiple of 8 up to 128", f"head_dim {head_dim}"
    yield right_band, "a full or square causal tile", f"{size}, band {tile.band}"
    yield multiples, f"rows and keys in multiples of {CUDNN_MULTIPLE}", size


def machine(device: torch.device) -> Machine:
    """What torch says about itself and about a GPU ("cuda": the current one)."""
    has_cudnn = torch.version.hip is None  # there the same question is answered by MIOpen
    return Machine(
        torch=torch_release(),
        cudnn=(torch.backends.cudnn.version() or 0) if has_cudnn else 0,
        capability=capability_of(device),
        enabled=torch.backends.cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@lru_cache  # asked for every tile
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) where there is none, and its tensors are fake."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def cuda_tile(machine: Machine, q: Tensor, k: Tensor, band: Band) -> CudaTile:
    """The tile of q (b, i, h, d) and k (b, j, g, d) under `band`, on `machine`."""
    return CudaTile(machine, q.dtype, q.shape[3], q.shape[1], k.shape[1], band)
