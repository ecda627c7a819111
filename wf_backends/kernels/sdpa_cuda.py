"""torch's operators for CUDA: its flash kernel, cuDNN's attention, and which computes a tile.

The flash kernel is torch's copy of flash-attn 2, or flash-attn 3 or 4 after a call of
`torch.nn.attention.activate_flash_attention_impl`. `cudnn_needs` lists what cuDNN needs; `machine`
and `capability_of` ask torch and the GPU.

Both backwards take the lse of the whole row and compute delta from out and dout, so the runtime may
pass any `out` that gives the right delta; see TileGrad.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
Source: aten/src/ATen/native/cudnn/MHA.cpp and transformers/cuda/attention_backward.cu of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators
from wf_backends.kernels.protocol import FLASH_DTYPES, Grads, OutLse, TileGrad, torch_release
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import flash_window, split_causal, split_window
from wf_backends.schedule import CAUSAL, FULL, Band

# For both see docs/internals/kernels.md.
CUDNN_MULTIPLE = 128  # of rows and keys of a tile for cuDNN
MIN_CUT_SCORES = 2**28  # rows x keys x heads from which a shifted causal tile is cut for cuDNN


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
    """A sub-tile of `split_window`; see Kernel.forward.

    Only the operator's first two results are used: the others are for dropout and debugging, and
    changed their meaning in torch 2.7.
    """
    rows, keys = q.shape[1], k.shape[1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, None, None, rows, keys, 0.0, False, False, **_tile_kwargs(q, k, scores, band)
    )
    return out, lse


def flash_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_window`; see Kernel.backward. The operator computes delta again."""
    dout, q, k, v, out, lse, _ = tile
    rows, keys = q.shape[1], k.shape[1]
    lse = lse.contiguous()  # the operator reads it as (b, h, i), whatever its strides
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # required, also without dropout
    args = dout, q, k, v, out, lse, None, None, rows, keys, 0.0, False, seed, seed[0]
    kwargs = _tile_kwargs(q, k, scores, band)
    return torch.ops.aten._flash_attention_backward.default(*args, **kwargs)


def _tile_kwargs(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    """The keyword arguments that flash's forward and backward have in common."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    return {"scale": scores.scale, "window_size_left": left, "window_size_right": right}


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
    """A sub-tile of `split_causal`, full or causal; see Kernel.forward."""
    causal = _is_causal(q, k, band)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scores.scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)  # (b, h, i, 1), packed


def cudnn_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
    """A sub-tile of `split_causal`, full or causal; see Kernel.backward. The operator computes
    delta again.

    torch keeps a compiled graph for each memory layout of q, k and v, and some releases use it
    again without a look at the layouts of out, dout and lse. So these always get the layout that
    torch gives them in a forward: out and dout have q's, lse is contiguous.
    """
    causal = _is_causal(tile.q, tile.k, band)
    *tensors, lse, _ = tile
    dout, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    dout, out = _laid_out_like(q, dout), _laid_out_like(q, out)
    lse = torch.empty((*lse.shape, 1), dtype=lse.dtype, device=lse.device).copy_(lse[..., None])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # required, also without dropout
    bias_and_lengths = None, None, None, q.shape[2], k.shape[2]
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, q, k, v, out, lse, seed, seed, *bias_and_lengths, 0.0, causal, scale=scores.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _is_causal(q: Tensor, k: Tensor, band: Band) -> bool:
    """The operator's `is_causal`, which counts from the top left, for a full or causal tile."""
    rows, keys = q.shape[1], k.shape[1]
    band = band.within(rows, keys)
    assert band in (FULL, CAUSAL), (rows, keys, band)
    return band == CAUSAL


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x (b, h, i, d) with the strides that torch gives to the output for q.

    It is a view of x if only strides of dimensions of size 1 differ, else a copy.
    """
    strides = torch.empty_like(q, device="meta").stride()
    dims = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or stride == q_stride for size, stride, q_stride in dims):
        return x.as_strided(x.shape, strides)
    return torch.empty_like(q).copy_(x)


CUDNN = Operators("cudnn", split_causal, cudnn_forward, cudnn_backward)
FLASH = Operators("flash", split_window, flash_forward, flash_backward)


@dataclass(frozen=True, slots=True)
class Machine:
    """The versions and settings of torch and the GPU that cuDNN's attention depends on."""

    torch: tuple[int, int]  # the release, (2, 13) for 2.13.0
    cudnn: int  # the version of the loaded library, 91501 for 9.15.1; 0 if torch has no cuDNN
    capability: tuple[int, int]  # compute capability, (9, 0) for a Hopper; (0, 0) without a GPU
    enabled: bool  # torch.backends.cuda.cudnn_sdp_enabled()
    deterministic: bool  # whether torch raises an error for operators that are not


@dataclass(frozen=True, slots=True)
class CudaTile:
    """The properties of a tile by which `choose` decides."""

    machine: Machine
    dtype: torch.dtype
    head_dim: int
    heads: int  # query heads of all samples
    rows: int
    keys: int
    band: Band


@lru_cache(maxsize=1024)  # called for every tile
def choose(tile: CudaTile) -> tuple[Operators, str]:
    """The operators for a tile, and the reason as text.

    cuDNN's where all its needs are met, since it is faster; else flash, which takes every tile.
    """
    for is_met, need, got in cudnn_needs(tile):
        if not is_met:
            return FLASH, f"flash; not cudnn, which needs {need}, got {got}"
    return CUDNN, "cudnn"


def cudnn_needs(tile: CudaTile) -> Iterator[tuple[bool, str, str]]:
    """What cuDNN needs of a tile: (whether it is met, the need as text, the tile's value)."""
    gpu, head_dim, rows, keys = tile.machine, tile.head_dim, tile.rows, tile.keys
    yield gpu.torch >= (2, 11), "torch 2.11 or later", f"torch {gpu.torch}"
    yield gpu.cudnn >= 91501, "cuDNN 9.15.1 or later", f"cudnn {gpu.cudnn}"
    capability = "compute capability (9, 0), (10, 0) or (10, 3)"
    is_met = gpu.capability in ((9, 0), (10, 0), (10, 3))
    yield is_met, capability, f"capability {gpu.capability}"
    yield gpu.enabled, "enable_cudnn_sdp(True)", f"enabled {gpu.enabled}"
    yield not gpu.deterministic, "use_deterministic_algorithms(False)", "deterministic True"
    yield tile.dtype in FLASH_DTYPES, "torch.bfloat16 or torch.float16", f"dtype {tile.dtype}"
    is_met = head_dim % 8 == 0 and head_dim <= 128
    yield is_met, "a head_dim that is a multiple of 8 up to 128", f"head_dim {head_dim}"
    band = tile.band.within(rows, keys)
    size = f"rows {rows}, keys {keys}, band {tile.band}"
    yield band.left == inf, "a tile without a bound on the left", size
    lengths = rows, keys, 0 if band.right == inf else band.right
    is_met = all(length % CUDNN_MULTIPLE == 0 for length in lengths)
    yield is_met, f"rows, keys and the band's shift in multiples of {CUDNN_MULTIPLE}", size
    is_met = band.right in (0, inf) or rows * keys * tile.heads >= MIN_CUT_SCORES
    need = f"{MIN_CUT_SCORES} scores in a shifted causal tile, which is cut in two"
    yield is_met, need, f"{size}, heads {tile.heads}"


def machine(device: torch.device) -> Machine:
    """The Machine of a GPU; the device "cuda" is the current GPU."""
    has_cudnn = torch.version.hip is None  # on ROCm this version is that of MIOpen
    return Machine(
        torch=torch_release(),
        cudnn=(torch.backends.cudnn.version() or 0) if has_cudnn else 0,
        capability=capability_of(device),
        enabled=torch.backends.cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@lru_cache  # called for every tile
def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; (0, 0) without a GPU, where its tensors are fake tensors."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def cuda_tile(machine: Machine, q: Tensor, k: Tensor, band: Band) -> CudaTile:
    """The tile of q (b, i, h, d) and k (b, j, g, d) under `band`, on `machine`."""
    batch, rows, heads, head_dim = q.shape
    return CudaTile(machine, q.dtype, head_dim, batch * heads, rows, k.shape[1], band)
