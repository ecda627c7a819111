"""What ring-flash-attn and yunchang import of flash-attn 2.7, on torch's operator for CPUs.

Same names, arguments and results. Masks are aligned at the bottom right, as in flash-attn; torch's
operator aligns them at the top left. Where the two differ, and for windows, a dense mask (i, j) is
made; the benchmarks need none.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from math import inf
from typing import Any, NoReturn

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """out (b, i, h, d) and lse (b, h, i) float32; no dropout mask, no random state."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    options = _options(q, k, causal, window_size_left, window_size_right)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _FORWARD(*heads_first, 0.0, scale=softmax_scale, **options)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Fills dq, dk, dv; returns delta (b, h, i) float32."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    options = _options(q, k, causal, window_size_left, window_size_right)
    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = _BACKWARD(*heads_first, softmax_lse, 0.0, scale=softmax_scale, **options)
    for grad, filled in zip(grads, (dq, dk, dv), strict=True):
        filled.copy_(grad.transpose(1, 2))
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def flash_attn_func(*args: object, **kwargs: object) -> NoReturn:
    """yunchang imports it; the attention of this benchmark does not call it."""
    raise NotImplementedError("the stand-in for flash-attn has no flash_attn_func")


def _flash_attn_varlen_forward(*args: object, **kwargs: object) -> NoReturn:
    """ring-flash-attn and yunchang import it; the attention of this benchmark does not call it."""
    raise NotImplementedError("the stand-in for flash-attn has no packed documents")


def _flash_attn_varlen_backward(*args: object, **kwargs: object) -> NoReturn:
    """See `_flash_attn_varlen_forward`."""
    raise NotImplementedError("the stand-in for flash-attn has no packed documents")


def _refuse(dropout_p: float, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError(
            "the stand-in for flash-attn has no dropout, soft cap or alibi, got "
            f"dropout_p={dropout_p}, softcap={softcap}, alibi_slopes={alibi_slopes}"
        )


def _options(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> dict[str, Any]:
    """The arguments of torch's operator for a mask."""
    rows, keys = q.shape[1], k.shape[1]
    right = 0 if causal else right
    if left < 0 and right < 0:
        return {"is_causal": False}
    if left < 0 and right == 0 and rows == keys:
        return {"is_causal": True}
    offset = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible &= offset >= (-left if left >= 0 else -inf)
    visible &= offset <= (right if right >= 0 else inf)
    mask = torch.zeros(1, 1, rows, keys, dtype=q.dtype).masked_fill(~visible, -inf)
    return {"is_causal": False, "attn_mask": mask}
