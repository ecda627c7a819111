"""flash-attn's functions, dense and on any device, with the signatures and rules of the real ones.

They check what our kernels say to flash-attn where no GPU is at hand: every argument is named as
in its release, window_size counts from the bottom right, long windows are forgotten or filled in
as flash_api.cpp does it, and lse must be contiguous.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

FLASH_3_SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> (Tensor, Tensor)",
)


def probabilities(
    q: Tensor, k: Tensor, scale: float, window: tuple[int, int], lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) (b, h, i, j) and lse (b, h, i), under flash-attn 2's rules for a window."""
    rows, keys = q.shape[1], k.shape[1]
    left, right = (-1 if w >= keys else w for w in window)
    if left >= 0 or right >= 0:
        left, right = (keys if w < 0 else w for w in (left, right))
    else:
        left = right = rows + keys
    offset = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    scores = (scores * scale).masked_fill(~((-left <= offset) & (offset <= right)), -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    p, lse = probabilities(q.float(), k.float(), scale, window)
    v_all = v.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bhij,bjhd->bihd", p, v_all).to(q.dtype), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.is_contiguous(), "flash-attn reads lse as contiguous memory"
    assert dout.dtype == out.dtype == q.dtype
    g, group = k.shape[2], q.shape[2] // k.shape[2]
    dtype, (dout, q, k, v, out) = q.dtype, (x.float() for x in (dout, q, k, v, out))
    p, _ = probabilities(q, k, scale, window, lse)
    dp = torch.einsum("bihd,bjhd->bhij", dout, v.repeat_interleave(group, 2))
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhij,bjhd->bihd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (g, group)).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", p, dout).unflatten(2, (g, group)).sum(3)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def flash_attn_2() -> ModuleType:
    """`flash_attn.flash_attn_interface` of flash-attn 2.7 and 2.8."""

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        assert (dropout_p, causal, softcap, alibi_slopes) == (0.0, False, 0.0, None)
        out, lse = forward(q, k, v, softmax_scale, (window_size_left, window_size_right))
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        assert (dropout_p, causal, softcap, alibi_slopes) == (0.0, False, 0.0, None)
        window = (window_size_left, window_size_right)
        grads = backward(dout, q, k, v, out, softmax_lse, softmax_scale, window)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)
        return torch.empty(0)

    module = ModuleType("flash_attn.flash_attn_interface")
    module.__dict__["_flash_attn_forward"] = _flash_attn_forward
    module.__dict__["_flash_attn_backward"] = _flash_attn_backward
    return module


def register_flash_attn_3(library: torch.library.Library) -> None:
    """The operators that importing `flash_attn_interface` registers, for the CPU."""

    def fwd(q, k, v, *rest):
        scale, causal, left, right = rest[20:24]
        assert not causal
        out, lse = forward(q, k, v, scale, (left, right))
        return out, lse, torch.empty(0), torch.empty(0)

    def bwd(  # torch leaves out last arguments that have their default
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        causal=False,
        left=-1,
        right=-1,
        *rest,
    ):
        assert not causal
        grads = backward(dout, q, k, v, out, softmax_lse, scale, (left, right))
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)
        return torch.empty(0), torch.empty(0)

    for schema, function in zip(FLASH_3_SCHEMAS, (fwd, bwd), strict=True):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")


def register_torch_flash(library: torch.library.Library) -> None:
    """torch's own `_flash_attention_forward` and `_backward`, which it has on CUDA, for the CPU."""

    def fwd(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, **windows):
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
        assert (dropout, causal, debug) == (0.0, False, False)
        window = (windows["window_size_left"], windows["window_size_right"])
        out, lse = forward(q, k, v, scale, window)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def bwd(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, *rng, **options):
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
        assert (dropout, causal, len(rng)) == (0.0, False, 2)
        window = (options["window_size_left"], options["window_size_right"])
        return backward(dout, q, k, v, out, lse, options["scale"], window)

    library.impl("_flash_attention_forward", fwd, "CPU")
    library.impl("_flash_attention_backward", bwd, "CPU")
