"""flash-attn's and cuDNN's functions on any device, dense: the real ones' signatures and rules.

They check what our kernels say to these libraries where no GPU is at hand: every argument is named
as in its release, flash-attn's window_size counts from the bottom right, long windows are forgotten
or filled in as flash_api.cpp does it, and lse must be contiguous; cuDNN is causal from the top left
and wants out, dout and lse laid out as torch's MHA.cpp allocates them.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

import threading
from types import ModuleType

import torch
from torch import Tensor

from wf_backends.kernels.dropout import mix

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
    q: Tensor,
    k: Tensor,
    scale: float,
    window: tuple[int, int],
    lse: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) (b, h, i, j) and lse (b, h, i), under flash-attn 2's rules for a window."""
    rows, keys = q.shape[1], k.shape[1]
    left, right = (-1 if w >= keys else w for w in window)
    if left >= 0 or right >= 0:
        left, right = (keys if w < 0 else w for w in (left, right))
    else:
        left = right = rows + keys
    offset = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    return softmax(q, k, scale, (-left <= offset) & (offset <= right), lse, cap)


def softmax(
    q: Tensor,
    k: Tensor,
    scale: float,
    seen: Tensor,
    lse: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) (b, h, i, j) and lse (b, h, i), where `seen` (i, j) is True."""
    scores = capped(q, k, scale, cap).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def capped(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """(b, h, i, j): scale q k^T, soft-capped where cap is not 0."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return cap * torch.tanh(scores / cap) if cap else scores


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: tuple[int, int],
    cap: float = 0.0,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    p, lse = probabilities(q.float(), k.float(), scale, window, cap=cap)
    return weigh(p * factors, v).to(q.dtype), lse


class PhiloxGenerator(threading.local):
    """A CUDA device's generator: a seed and an offset in multiples of 4; each thread is a rank."""

    def __init__(self) -> None:
        self.state = (0, 0)

    def get_state(self) -> tuple[int, int]:
        return self.state

    def set_state(self, state: tuple[int, int]) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 1 << 64
        self.state = (seed, 0)

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.state = (self.state[0], offset)

    def advance(self, by: int) -> tuple[int, int]:
        before = self.state
        self.state = (before[0], before[1] + by)
        return before


def dropped(state: tuple[int, int], p: float, q: Tensor, k: Tensor) -> Tensor:
    """(b, h, i, j): 0 or 1 / (1 - p), by seed, offset + (sample heads + head) 32, row and key."""
    (seed, offset), (b, rows, h, _) = state, q.shape
    number = offset + 32 * torch.arange(b * h).view(b, h, 1, 1)
    for one in (torch.arange(rows)[:, None], torch.arange(k.shape[1])):
        number = mix(number + seed) + one
    return ((mix(number) & 0xFFFF) >= int(p * (1 << 16))) / (1 - p)


def weigh(p: Tensor, v: Tensor) -> Tensor:
    """(b, i, h, d) from p (b, h, i, j) and v (b, j, g, d)."""
    group = p.shape[1] // v.shape[2]
    return torch.einsum("bhij,bjhd->bihd", p, v.float().repeat_interleave(group, 2))


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: tuple[int, int],
    cap: float = 0.0,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.is_contiguous(), "flash-attn reads lse as contiguous memory"
    p, _ = probabilities(q.float(), k.float(), scale, window, lse, cap)
    return gradients(p, dout, q, k, v, out, scale, cap, factors)


def gradients(
    p: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
    cap: float = 0.0,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of flash-attn's backward, which computes delta from dout and out."""
    assert dout.dtype == out.dtype == q.dtype
    g, group = k.shape[2], q.shape[2] // k.shape[2]
    dtype, (dout, q, k, v, out) = q.dtype, (x.float() for x in (dout, q, k, v, out))
    dp = torch.einsum("bihd,bjhd->bhij", dout, v.repeat_interleave(group, 2)) * factors
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    if cap:
        ds = ds * (1 - (capped(q, k, scale, cap) / cap).square())
    dq = torch.einsum("bhij,bjhd->bihd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (g, group)).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", p * factors, dout).unflatten(2, (g, group)).sum(3)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def flash_attn_2(generator: PhiloxGenerator | None = None) -> ModuleType:
    """`flash_attn.flash_attn_interface` of flash-attn 2.7 and 2.8.

    Args:
        generator: that of the device, from which dropout draws.
    """

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
        assert (causal, alibi_slopes) == (False, None) and not (softcap and dropout_p)
        state, factors = (0, 0), 1.0
        if dropout_p:
            state = generator.advance(q.shape[0] * q.shape[2] * 32)
            factors = dropped(state, dropout_p, q, k)
        window = (window_size_left, window_size_right)
        out, lse = forward(q, k, v, softmax_scale, window, softcap, factors)
        return out, lse, torch.empty(0), torch.tensor(state)

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
        assert (causal, alibi_slopes) == (False, None) and not (softcap and dropout_p)
        factors = 1.0
        if dropout_p:
            assert rng_state.dtype == torch.int64 and rng_state.is_contiguous()
            factors = dropped(tuple(rng_state.tolist()), dropout_p, q, k)
        window = (window_size_left, window_size_right)
        grads = backward(dout, q, k, v, out, softmax_lse, softmax_scale, window, softcap, factors)
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
        scale, causal, left, right, chunk, cap = rest[20:26]
        assert not causal and not chunk
        out, lse = forward(q, k, v, scale, (left, right), cap)
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
        cap=0.0,
        *rest,
    ):
        assert not causal
        grads = backward(dout, q, k, v, out, softmax_lse, scale, (left, right), cap)
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


def register_torch_cudnn(library: torch.library.Library, calls: list[str]) -> None:
    """torch's `_scaled_dot_product_cudnn_attention` and `_backward`, for the CPU and any dtype.

    As in MHA.cpp: rows and keys are more than one, `is_causal` counts from the top left, out has
    q's memory order, lse is (b, h, i, 1) and packed, and a compiled graph that is used again reads
    out, dout and lse as if they lay as the first ones did. `calls` gets "forward" and "backward".
    """

    def seen(q, k, causal):
        assert q.shape[2] > 1 and k.shape[2] > 1, "sequence length 1"
        assert all(x.stride(3) == 1 for x in (q, k)), "the last stride must be 1"
        every = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return every.tril() if causal else every

    def fwd(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        calls.append("forward")
        mask, (rows, cols, values) = seen(q, k, causal), (x.transpose(1, 2) for x in (q, k, v))
        p, lse = softmax(rows.float(), cols.float(), scale, mask)
        out = torch.empty_like(q).copy_(weigh(p, values).transpose(1, 2))
        seed = torch.empty((), dtype=torch.int64)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed, None

    def bwd(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, *rest, scale):
        assert (bias, cum_q, cum_k, max_q, max_k) == (None, None, None, q.shape[2], k.shape[2])
        assert seed.dtype == offset.dtype == torch.int64 and rest[0] == 0.0
        laid_out = torch.empty_like(q).stride()
        assert out.stride() == dout.stride() == laid_out, "read as if it lay like q"
        packed = (*q.shape[:3], 1)
        assert lse.shape == packed and lse.stride() == torch.empty(packed).stride()
        calls.append("backward")
        mask = seen(q, k, rest[1])
        dout, rows, cols, values, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        p, _ = softmax(rows.float(), cols.float(), scale, mask, lse[..., 0])
        grads = gradients(p, dout, rows, cols, values, out, scale)
        pairs = zip((q, k, v), grads, strict=True)
        return tuple(torch.empty_like(x).copy_(grad.transpose(1, 2)) for x, grad in pairs)

    library.impl("_scaled_dot_product_cudnn_attention", fwd, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", bwd, "CPU")
