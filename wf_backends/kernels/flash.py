"""flash-attn 2 and 3: the one place that knows their versions.

The libraries are imported when the first tile on a CUDA device needs them. flash-attn 4, which
changes its functions from week to week, is reached through torch and the sdpa kernel instead:
`torch.nn.attention.activate_flash_attention_impl("FA4")`.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.merge import Operators, SplitKernel
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    OutLse,
    TileGrad,
    flash_refuses,
    lacks,
)
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import flash_window, split_window
from wf_backends.schedule import Band

_HOPPER = (9, 0)
_MIN_FLASH_2 = (2, 7)
_INSTALL = 'pip install "flash-attn>=2.7" --no-build-isolation'


def flash_attn_2() -> Operators:
    """flash-attn 2.7 and later, whose functions also take arguments for dropout and ALiBi."""
    interface = import_module("flash_attn.flash_attn_interface")
    defaults = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}
    forward = partial(interface._flash_attn_forward, return_softmax=False, **defaults)
    backward = partial(interface._flash_attn_backward, **defaults)
    return _operators("flash-attn 2", forward, backward)


def flash_attn_3() -> Operators:
    """flash-attn 3; every release that registers these operators gives them the same arguments."""
    import_module("flash_attn_interface")  # registers the operators
    ops = torch.ops.flash_attn_3
    return _operators("flash-attn 3", partial(ops.fwd, num_splits=1), ops.bwd)


class FlashKernel(SplitKernel):
    """The Kernel protocol on the newest flash-attn that is installed and runs on this GPU."""

    name = "flash"

    def refuses(self, spec: KernelSpec) -> str | None:
        """What flash-attn lacks, or how to install it; see Kernel.refuses."""
        if spec.device != "cuda":
            return f"flash-attn needs a CUDA device, got {spec.device}"
        if spec.dtype not in FLASH_DTYPES:
            return f"flash-attn takes torch.bfloat16 and torch.float16, got {spec.dtype}"
        library = "flash-attn's functions as they are called here"
        if refusal := lacks(spec, library, "softcap") or flash_refuses(spec):
            return refusal
        return None if has_flash_3() else missing_flash_2()

    def runs(self, spec: KernelSpec) -> str:
        return "flash-attn 3" if has_flash_3() else "flash-attn 2"

    def operators(self, q: Tensor, k: Tensor, band: Band) -> Operators:
        """flash-attn 2 or 3, the same for every tile of a call; see SplitKernel.operators."""
        return self._operators

    @cached_property
    def _operators(self) -> Operators:
        return flash_attn_3() if has_flash_3() else flash_attn_2()


def missing_flash_2() -> str | None:
    """Why flash-attn 2 cannot be used and what to type; None if it can."""
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return f"flash-attn is not installed; type: {_INSTALL}"
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _MIN_FLASH_2:
        return f"flash-attn {version} is too old, 2.7 is the oldest known here; type: {_INSTALL}"
    return None


def has_flash_3() -> bool:
    """Whether flash-attn 3 is installed and this GPU is a Hopper, for which it was written."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    return find_spec("flash_attn_interface") is not None


def _tile_kwargs(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    """The keyword arguments for a tile that both releases have."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    windows = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": scores.scale, "softcap": scores.softcap, **windows}


def _operators(name: str, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Operators:
    """A library's functions, which take the arguments of `_tile_kwargs`, as `Operators`."""

    def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        out, lse, *_ = fwd(q, k, v, **_tile_kwargs(q, k, scores, band))
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
        dout, q, k, v, out, lse, _ = tile
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        tensors = dout, q, k, v, out, lse.contiguous(), dq, dk, dv  # lse is read as (b, h, i)
        deterministic = torch.are_deterministic_algorithms_enabled()
        bwd(*tensors, deterministic=deterministic, **_tile_kwargs(q, k, scores, band))
        return dq, dk, dv

    return Operators(name, split_window, forward, backward)
