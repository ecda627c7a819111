"""flash-attn 2 and 3: the one place that knows their versions.

Nothing is imported before a CUDA device asks for it. flash-attn 4, which changes its functions
from week to week, is reached through torch and the sdpa kernel instead:
`torch.nn.attention.activate_flash_attention_impl("FA4")`.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from wf_backends.kernels.protocol import Grads, KernelSpec, TileGrad, too_old_for_flash
from wf_backends.kernels.split_run import piecewise_backward, piecewise_forward
from wf_backends.kernels.tile_split import Piece, cut_window, flash_window, whole
from wf_backends.schedule import Band

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIM = 256
_HOPPER = (9, 0)
_OLDEST = (2, 7)
_INSTALL = 'pip install "flash-attn>=2.7" --no-build-isolation'


Window = tuple[int, int]
"""flash-attn's window_size: (left, right), -1 = unlimited."""


class FlashApi(Protocol):
    """One flash-attn's way of saying Kernel.forward and Kernel.backward with a window_size."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window
    ) -> tuple[Tensor, Tensor]: ...

    def backward(self, tile: TileGrad, scale: float, window: Window) -> Grads: ...


class FlashAttention2:
    """flash-attn 2.7 and later."""

    def __init__(self) -> None:
        self._interface = import_module("flash_attn.flash_attn_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window
    ) -> tuple[Tensor, Tensor]:
        """See FlashApi; the function also returns dropout's mask and random state."""
        out, lse, *_ = self._interface._flash_attn_forward(
            q, k, v, return_softmax=False, **_options_2(scale, window)
        )
        return out, lse

    def backward(self, tile: TileGrad, scale: float, window: Window) -> Grads:
        """See FlashApi; the function fills the gradients it is handed."""
        dout, q, k, v, out, lse, _ = tile
        grads = _empty_grads(q, k, v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = _options_2(scale, window)
        self._interface._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), *grads, deterministic=deterministic, **options
        )
        return grads


class FlashAttention3:
    """flash-attn 3, whose operators are the same in every release that registers them."""

    def __init__(self) -> None:
        import_module("flash_attn_interface")  # registers the operators
        self._ops = torch.ops.flash_attn_3

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window
    ) -> tuple[Tensor, Tensor]:
        """See FlashApi."""
        out, lse, *_ = self._ops.fwd(q, k, v, num_splits=1, **_options_3(scale, window))
        return out, lse

    def backward(self, tile: TileGrad, scale: float, window: Window) -> Grads:
        """See FlashApi; what the operator fills is the same in every release."""
        dout, q, k, v, out, lse, _ = tile
        grads = _empty_grads(q, k, v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = _options_3(scale, window)
        self._ops.bwd(
            dout, q, k, v, out, lse.contiguous(), *grads, deterministic=deterministic, **options
        )
        return grads


class FlashKernel:
    """The Kernel protocol on the newest flash-attn that is installed and runs on this GPU."""

    name = "flash"

    def __init__(self) -> None:
        self._loaded: FlashApi | None = None

    def refuses(self, spec: KernelSpec) -> str | None:
        """What flash-attn lacks, or what to type to have it; see Kernel.refuses."""
        if spec.device != "cuda":
            return f"flash-attn needs a CUDA device, got {spec.device}"
        if spec.dtype not in _DTYPES:
            return f"flash-attn takes torch.bfloat16 and torch.float16, got {spec.dtype}"
        if spec.head_dim % 8 or spec.head_dim > _HEAD_DIM:
            return f"head_dim must be a multiple of 8 up to {_HEAD_DIM}, got {spec.head_dim}"
        return too_old_for_flash() or (None if _has_flash_3() else missing_flash_2())

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        return "flash-attn 3" if _has_flash_3() else "flash-attn 2"

    def split(self, rows: int, keys: int, band: Band, device: torch.device) -> tuple[Piece, ...]:
        """Uncut; see Kernel.split."""
        return whole(rows, keys, band)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        pieces = cut_window(q.shape[1], k.shape[1], band)
        return piecewise_forward(self._forward_piece, pieces, q, k, v, scale)

    def backward(self, tile: TileGrad, scale: float, band: Band) -> Grads:
        """See Kernel.backward; flash-attn computes delta again, from dout and out."""
        pieces = cut_window(tile.q.shape[1], tile.k.shape[1], band)
        return piecewise_backward(self._backward_piece, pieces, tile, scale)

    def _forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        window = flash_window(band, q.shape[1], k.shape[1])
        return self._api().forward(q, k, v, scale, window)

    def _backward_piece(self, tile: TileGrad, scale: float, band: Band) -> Grads:
        window = flash_window(band, tile.q.shape[1], tile.k.shape[1])
        return self._api().backward(tile, scale, window)

    def _api(self) -> FlashApi:
        if self._loaded is None:
            self._loaded = FlashAttention3() if _has_flash_3() else FlashAttention2()
        return self._loaded


def missing_flash_2() -> str | None:
    """What is wrong with the installed flash-attn 2 and what to type; None if nothing is."""
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return f"flash-attn is not installed; type: {_INSTALL}"
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _OLDEST:
        return f"flash-attn {version} is too old, 2.7 is the oldest known here; type: {_INSTALL}"
    return None


def _has_flash_3() -> bool:
    """Whether flash-attn 3 is installed and this is the GPU it was written for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    return find_spec("flash_attn_interface") is not None


def _options_2(scale: float, window: Window) -> dict[str, object]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": False,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _options_3(scale: float, window: Window) -> dict[str, object]:
    return {
        "softmax_scale": scale,
        "window_size_left": window[0],
        "window_size_right": window[1],
    }


def _empty_grads(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous tensors for flash-attn to fill with dq, dk, dv."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
    return dq, dk, dv
