"""The softmax options of an attention call: checked, and as kernels take and ranks compare them.

Shapes: h query heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, sqrt
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from wf_backends._validation import is_real
from wf_backends.kernels import Dropout, Scores
from wf_backends.runtime import Learned

ComparedOptions = tuple[tuple[str, object], ...]
"""(name in errors, value) of what must be the same on all ranks; hashable."""


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """How scores follow from q k^T, and the learned parameters of the softmax."""

    scores: Scores
    learned: Learned
    options: ComparedOptions


@lru_cache(maxsize=64)
def plain_softmax(head_dim: int) -> Softmax:
    """The Softmax of a call without options: only the scale 1 / sqrt(head_dim)."""
    return make_softmax(torch.empty(1, 1, 1, head_dim), None, 0.0, None, None)


def make_softmax(
    q: Tensor,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    kv_up: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Softmax:
    """The Softmax of a call with these arguments of `SequenceParallel.attention`.

    Args:
        q: (b, s, h, d), for its heads, head_dim and device.

    Raises:
        ValueError: for a softmax_scale that requires a gradient or is not positive and finite, a
            softcap below 0, sinks, slopes or a position_bias of a wrong shape, dtype or device, a
            bias that is not finite (not read on a GPU), slopes that require a gradient, a dropout_p
            outside [0, 1), and a dropout_seed that is not an integer in [0, 2**63).
    """
    scale, cap, heads = _scale(softmax_scale, q.shape[3]), _softcap(softcap), q.shape[2]
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        fits = _shape(x) == (heads,)
        _check_floats(name, x, q, fits, f"floats, one for each of the {heads} heads")
    shape = _shape(position_bias) or ()
    fits = len(shape) == 2 and shape[0] == heads and shape[1] % 2 == 1
    expected = f"floats ({heads} heads, 2 n - 1), of the distances 1 - n to n - 1"
    _check_floats("position_bias", position_bias, q, fits, expected)
    if position_bias is not None and position_bias.is_cpu and not position_bias.isfinite().all():
        raise ValueError("position_bias must be finite, got inf or nan: hide keys by the mask")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient: pass alibi_slopes.detach()")
    dropout = _dropout(dropout_p, dropout_seed, heads)
    options: dict[str, object] = {
        "softmax_scale": scale,
        "softcap": cap,
        "sinks": sinks is not None,
        "alibi_slopes": _comparable(alibi_slopes),
        "dropout_p": float(dropout_p),
        "dropout_seed": dropout_seed if dropout else None,
        "kv_up": _shape(kv_up),
        "position_bias": _shape(position_bias),
    }
    scores = Scores(scale, cap, alibi_slopes, dropout)
    return Softmax(scores, Learned(sinks, kv_up, position_bias), tuple(options.items()))


def _scale(softmax_scale: Any, head_dim: int) -> float:
    if isinstance(softmax_scale, Tensor) and softmax_scale.requires_grad:
        raise ValueError(
            "softmax_scale must be a number, got a tensor that requires a gradient, which would be "
            "lost: multiply q by it"
        )
    if softmax_scale is None:
        return 1 / sqrt(head_dim)
    is_scalar = isinstance(softmax_scale, Tensor) and softmax_scale.numel() == 1
    is_number = isinstance(softmax_scale, Real) and not isinstance(softmax_scale, bool)
    if not (is_scalar or is_number) or not 0 < float(softmax_scale) < inf:
        raise ValueError(
            "softmax_scale must be a positive and finite number or None, got "
            f"{softmax_scale!r}: torch's kernels give NaN for others; multiply q by a factor"
        )
    return float(softmax_scale)


def _softcap(softcap: Any) -> float:
    if not is_real(softcap) or not 0 <= softcap < inf:
        raise ValueError(f"softcap must be a number from 0 (none) on, got {softcap!r}")
    return float(softcap)


def _dropout(p: Any, seed: Any, heads: int) -> Dropout | None:
    if not is_real(p) or not 0 <= p < 1:
        raise ValueError(f"dropout_p must be a number in [0, 1), got {p!r}")
    is_integer = isinstance(seed, int) and not isinstance(seed, bool)
    if seed is not None and not (is_integer and 0 <= seed < 1 << 63):
        raise ValueError(f"dropout_seed must be an integer in [0, 2**63) or None, got {seed!r}")
    return Dropout(float(p), seed, (0, heads)) if p else None


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of a tensor; None for anything else."""
    return tuple(x.shape) if isinstance(x, Tensor) else None


def _check_floats(name: str, x: Any, q: Tensor, fits: bool, expected: str) -> None:
    """Raise a ValueError unless x is None, or floats on q's device whose shape `fits`."""
    if x is None:
        return
    if not fits or not x.is_floating_point():
        got = f"{x.dtype} {_shape(x)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name} must be {expected}, got {got}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def _comparable(slopes: Tensor | None) -> object:
    """The slopes' values on a CPU; on a GPU, where reading stalls, only whether there are any."""
    if slopes is None or slopes.device != torch.device("cpu"):
        return slopes is not None
    return tuple(slopes.tolist())
