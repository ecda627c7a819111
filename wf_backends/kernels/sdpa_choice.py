"""Which of torch's CUDA operators computes a tile, and why: cuDNN's or flash-attn's.

What cuDNN needs is one table; `machine` is the one place that asks torch and the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators
from wf_backends.kernels.protocol import FLASH_DTYPES, torch_release
from wf_backends.kernels.sdpa_cuda import cuda_backward, cuda_forward
from wf_backends.kernels.sdpa_cudnn import cudnn_backward, cudnn_forward
from wf_backends.kernels.tile_split import effective, split_window, whole
from wf_backends.schedule import CAUSAL, FULL, Band

CUDNN = Operators("cudnn", whole, cudnn_forward, cudnn_backward)
FLASH = Operators("flash", split_window, cuda_forward, cuda_backward)

CUDNN_MULTIPLE = 128
"""Rows and keys of a tile for cuDNN come in multiples of this: see docs/internals/kernels.md."""


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


class CudaChoice(NamedTuple):
    """The operators for a tile, and why these."""

    operators: Operators
    reason: str


@lru_cache(maxsize=1024)  # asked for every tile
def choose(tile: CudaTile) -> CudaChoice:
    """cuDNN if it lacks nothing, since it is faster; else flash, which takes every tile."""
    for holds, need, got in cudnn_needs(tile):
        if not holds:
            return CudaChoice(FLASH, f"flash; not cudnn, which needs {need}, got {got}")
    return CudaChoice(CUDNN, "cudnn")


def cudnn_needs(tile: CudaTile) -> Iterator[tuple[bool, str, str]]:
    """What cuDNN needs of a tile: (whether it is so, in words, what there is instead)."""
    on, head_dim, rows, keys = tile.machine, tile.head_dim, tile.rows, tile.keys
    gpus, shown = ((9, 0), (10, 0), (10, 3)), effective(rows, keys, tile.band)
    right_band = shown == FULL or (shown == CAUSAL and rows == keys)
    multiples = rows % CUDNN_MULTIPLE == 0 == keys % CUDNN_MULTIPLE
    size = f"rows {rows}, keys {keys}"
    yield on.torch >= (2, 13), "torch 2.13 or later", f"torch {on.torch}"
    yield on.cudnn >= 91501, "cuDNN 9.15.1 or later", f"cudnn {on.cudnn}"
    capability = "compute capability (9, 0), (10, 0) or (10, 3)"
    yield on.capability in gpus, capability, f"capability {on.capability}"
    yield on.enabled, "enable_cudnn_sdp(True)", f"enabled {on.enabled}"
    random_order = "use_deterministic_algorithms(False)"
    yield not on.deterministic, random_order, f"deterministic {on.deterministic}"
    yield tile.dtype in FLASH_DTYPES, "torch.bfloat16 or torch.float16", f"dtype {tile.dtype}"
    short = head_dim % 8 == 0 and head_dim <= 128
    yield short, "a head_dim that is a multiple of 8 up to 128", f"head_dim {head_dim}"
    yield right_band, "a full or square causal tile", f"{size}, band {tile.band}"
    yield multiples, f"rows and keys in multiples of {CUDNN_MULTIPLE}", size


def machine(device: torch.device | None = None) -> Machine:
    """What torch says about itself and about `device` (None: the current GPU)."""
    has_cudnn = torch.version.hip is None  # there the same question is answered by MIOpen
    has_gpu = torch.cuda.is_available()
    return Machine(
        torch=torch_release(),
        cudnn=(torch.backends.cudnn.version() or 0) if has_cudnn else 0,
        capability=torch.cuda.get_device_capability(device) if has_gpu else (0, 0),
        enabled=torch.backends.cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def cuda_tile(machine: Machine, q: Tensor, k: Tensor, band: Band) -> CudaTile:
    """The tile of q (b, i, h, d) and k (b, j, g, d) under `band`, on `machine`."""
    return CudaTile(machine, q.dtype, q.shape[3], q.shape[1], k.shape[1], band)
