"""flash-attn 2 and 3: the one place that knows their versions.

Nothing is imported before a CUDA device asks for it. flash-attn 4, which changes its functions
from week to week, is reached through torch and the sdpa kernel instead:
`torch.nn.attention.activate_flash_attention_impl("FA4")`.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.flash_dropout import by_sample
from wf_backends.kernels.merge import Operators, OperatorsFor, split_backward, split_forward
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    TileGrad,
    flash_refuses,
    lacks,
)
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import flash_window, split_window
from wf_backends.schedule import Band

_HOPPER = (9, 0)
_OLDEST = (2, 7)
_OPTIONS = "softcap", "dropout"
_DROPOUT = (
    "flash-attn 2's own dropout falls on the same weights for every number of ranks only where a "
    "rank computes the whole sequence for some heads (one rank, or ulysses_degree = all ranks), "
    'without a soft cap; kernel "reference" has dropout on every route'
)
_INSTALL = 'pip install "flash-attn>=2.7" --no-build-isolation'


def flash_attn_2(drops: bool = False) -> Operators:
    """flash-attn 2.7 and later: functions that are told of dropout and ALiBi too.

    Args:
        drops: by flash-attn's own dropout (flash_dropout.py).
    """
    interface = import_module("flash_attn.flash_attn_interface")
    without = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        options = without | _options(q, k, scores, band) | dropout
        out, lse, *_ = interface._flash_attn_forward(q, k, v, return_softmax=False, **options)
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band, **dropout: Any) -> Grads:
        options = without | _options(tile.q, tile.k, scores, band) | dropout
        return _filled(interface._flash_attn_backward, tile, options)

    both = by_sample(forward, backward) if drops else (forward, backward)
    return Operators("flash-attn 2", split_window, *both)


def flash_attn_3() -> Operators:
    """flash-attn 3, whose operators are the same in every release that registers them."""
    import_module("flash_attn_interface")  # registers the operators
    ops = torch.ops.flash_attn_3

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = ops.fwd(q, k, v, num_splits=1, **_options(q, k, scores, band))
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
        return _filled(ops.bwd, tile, _options(tile.q, tile.k, scores, band))

    return Operators("flash-attn 3", split_window, forward, backward)


class FlashKernel:
    """The Kernel protocol on the newest flash-attn that is installed and runs on this GPU.

    Dropout is for flash-attn 2: 3 has none.
    """

    name = "flash"

    def __init__(self) -> None:
        self._loaded: dict[bool, Operators] = {}

    def refuses(self, spec: KernelSpec) -> str | None:
        """What flash-attn lacks, or what to type to have it; see Kernel.refuses."""
        if spec.device != "cuda":
            return f"flash-attn needs a CUDA device, got {spec.device}"
        if spec.dtype not in FLASH_DTYPES:
            return f"flash-attn takes torch.bfloat16 and torch.float16, got {spec.dtype}"
        if lacking := lacks(spec, "flash-attn's functions as they are called here", *_OPTIONS):
            return lacking
        if spec.dropout and not (spec.whole and not spec.softcap):
            return _DROPOUT
        newer = _has_flash_3() and not spec.dropout
        return flash_refuses(spec) or (None if newer else missing_flash_2())

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        if spec.dropout:
            return "flash-attn 2 and its own dropout"
        return "flash-attn 3" if _has_flash_3() else "flash-attn 2"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        return split_forward(self._operators(scores), q, k, v, scores, band)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward; flash-attn computes delta again, from dout and out."""
        return split_backward(self._operators(scores), tile, scores, band)

    def _operators(self, scores: Scores) -> OperatorsFor:
        """The same for every tile."""
        drops = scores.dropout is not None
        if drops not in self._loaded:
            newer = _has_flash_3() and not drops
            self._loaded[drops] = flash_attn_3() if newer else flash_attn_2(drops)
        return lambda q, k, band: self._loaded[drops]


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


def _options(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    """What both releases are told about a tile."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    windows = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": scores.scale, "softcap": scores.softcap, **windows}


def _filled(backward: Callable[..., Any], tile: TileGrad, options: dict[str, Any]) -> Grads:
    """dq, dk, dv: contiguous tensors that `backward` fills; lse is read as (b, h, i), packed."""
    dout, q, k, v, out, lse, _ = tile
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = dout, q, k, v, out, lse.contiguous(), dq, dk, dv
    backward(*given, deterministic=deterministic, **options)
    return dq, dk, dv
