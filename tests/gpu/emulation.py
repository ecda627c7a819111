"""The functions of flash-attn and cuDNN on a CPU, with the libraries' signatures and rules.

With them tests check the arguments of our kernels without a GPU. Every argument has the name of
the library's release. flash-attn's window_size counts from the bottom right, a side of at least as
many keys as there are is unlimited, and lse must be contiguous. cuDNN is causal from the top left,
and needs out, dout and lse in the memory layout in which torch's MHA.cpp allocates them.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.gpu.dense_tile import gradients, probabilities, seen_in_window, weighted_sum

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


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    seen = seen_in_window(q.shape[1], k.shape[1], window)
    p, lse = probabilities(q, k, scale, seen, softcap=softcap)
    return weighted_sum(p, v).to(q.dtype), lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.is_contiguous(), "flash-attn reads lse as contiguous memory"
    seen = seen_in_window(q.shape[1], k.shape[1], window)
    p, _ = probabilities(q, k, scale, seen, lse, softcap)
    return gradients(p, dout, q, k, v, out, scale, softcap)


def flash_attn_2() -> ModuleType:
    """The module `flash_attn.flash_attn_interface` of flash-attn 2.7 and 2.8."""

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
        assert (dropout_p, causal, alibi_slopes) == (0.0, False, None)
        window = (window_size_left, window_size_right)
        out, lse = flash_forward(q, k, v, softmax_scale, window, softcap)
        return out, lse, torch.empty(0), torch.zeros(2)

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
        assert (dropout_p, causal, alibi_slopes) == (0.0, False, None)
        window = (window_size_left, window_size_right)
        tensors = (dout, q, k, v, out, softmax_lse)
        grads = flash_backward(*tensors, softmax_scale, window, softcap)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)
        return torch.empty(0)

    module = ModuleType("flash_attn.flash_attn_interface")
    module.__dict__["_flash_attn_forward"] = _flash_attn_forward
    module.__dict__["_flash_attn_backward"] = _flash_attn_backward
    return module


def register_flash_attn_3(library: torch.library.Library) -> None:
    """Define for the CPU the operators that importing `flash_attn_interface` registers."""

    def fwd(q, k, v, *args):
        scale, causal, left, right, attention_chunk, softcap = args[20:26]
        assert not causal and not attention_chunk
        out, lse = flash_forward(q, k, v, scale, (left, right), softcap)
        return out, lse, torch.empty(0), torch.empty(0)

    def bwd(  # torch omits trailing arguments that have their default
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
        softcap=0.0,
        *args,
    ):
        assert not causal
        grads = flash_backward(dout, q, k, v, out, softmax_lse, scale, (left, right), softcap)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)
        return torch.empty(0), torch.empty(0)

    for schema, function in zip(FLASH_3_SCHEMAS, (fwd, bwd), strict=True):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")


def register_torch_flash(library: torch.library.Library) -> None:
    """Define for the CPU torch's `_flash_attention_forward` and `_backward`, which CUDA has."""

    def fwd(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, **windows):
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
        assert (dropout, causal, debug) == (0.0, False, False)
        window = (windows["window_size_left"], windows["window_size_right"])
        out, lse = flash_forward(q, k, v, scale, window)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def bwd(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, *rng, **options):
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
        assert (dropout, causal, len(rng)) == (0.0, False, 2)
        window = (options["window_size_left"], options["window_size_right"])
        return flash_backward(dout, q, k, v, out, lse, options["scale"], window)

    library.impl("_flash_attention_forward", fwd, "CPU")
    library.impl("_flash_attention_backward", bwd, "CPU")


def register_torch_cudnn(library: torch.library.Library, calls: list[str]) -> None:
    """Define for the CPU torch's `_scaled_dot_product_cudnn_attention` and `_backward`.

    As in MHA.cpp: rows and keys are more than one, `is_causal` counts from the top left, out has
    q's memory layout, lse is (b, h, i, 1) and contiguous, and a compiled graph that is used again
    reads out, dout and lse in the layouts of its first call. Tensors may have any dtype.

    Args:
        calls: gets "forward" or "backward" at each call.
    """

    def seen_keys(q, k, causal):
        assert q.shape[2] > 1 and k.shape[2] > 1, "sequence length 1"
        assert all(x.stride(3) == 1 for x in (q, k)), "the last stride must be 1"
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return seen.tril() if causal else seen

    def fwd(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        calls.append("forward")
        q_rows, k_rows, v_rows = (x.transpose(1, 2) for x in (q, k, v))
        p, lse = probabilities(q_rows, k_rows, scale, seen_keys(q, k, causal))
        out = torch.empty_like(q).copy_(weighted_sum(p, v_rows).transpose(1, 2))
        seed = torch.empty((), dtype=torch.int64)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed, None

    def bwd(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, *args, scale):
        dropout, causal = args
        assert (bias, cum_q, cum_k, max_q, max_k) == (None, None, None, q.shape[2], k.shape[2])
        assert seed.dtype == offset.dtype == torch.int64 and dropout == 0.0
        layout = torch.empty_like(q).stride()
        assert out.stride() == dout.stride() == layout, "out and dout are read in q's layout"
        lse_shape = (*q.shape[:3], 1)
        assert lse.shape == lse_shape and lse.stride() == torch.empty(lse_shape).stride()
        calls.append("backward")
        seen = seen_keys(q, k, causal)
        rows = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        p, _ = probabilities(rows[1], rows[2], scale, seen, lse[..., 0])
        grads = gradients(p, *rows, scale)
        pairs = zip((q, k, v), grads, strict=True)
        return tuple(torch.empty_like(x).copy_(grad.transpose(1, 2)) for x, grad in pairs)

    library.impl("_scaled_dot_product_cudnn_attention", fwd, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", bwd, "CPU")


def register_torch_efficient(library: torch.library.Library) -> None:
    """Define for the CPU torch's `_scaled_dot_product_efficient_attention` and `_backward`.

    As in attention.cu: queries and keys have as many heads, lse is as long as the next multiple of
    32 rows, the mask has all samples and heads, and its rows begin at multiples of 4 elements.
    """

    def seen_keys(q, k, v, mask, causal):
        assert q.shape[1] == k.shape[1] == v.shape[1], "no grouped key heads"
        assert all(x.stride(3) == 1 and x.stride(2) % 4 == 0 for x in (q, k, v))
        rows, keys = q.shape[2], k.shape[2]
        if mask is None:
            seen = torch.ones(rows, keys, dtype=torch.bool)
            return seen.tril() if causal else seen
        assert not causal and mask.dtype == q.dtype and mask.stride(2) % 4 == 0
        assert mask.shape == (*q.shape[:2], rows, keys) and mask.stride(3) == 1
        return mask[0, 0] == 0

    def fwd(q, k, v, mask, with_lse, dropout=0.0, causal=False, *, scale=None):
        assert with_lse and dropout == 0.0
        q_rows, k_rows, v_rows = (x.transpose(1, 2) for x in (q, k, v))
        p, lse = probabilities(q_rows, k_rows, scale, seen_keys(q, k, v, mask, causal))
        lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        return weighted_sum(p, v_rows).to(q.dtype).transpose(1, 2), lse, None, None

    def bwd(dout, q, k, v, mask, out, lse, seed, offset, dropout, wanted, causal=False, *, scale):
        assert dropout == 0.0 and wanted == [True, True, True, False]
        assert seed.dtype == offset.dtype == torch.int64
        assert lse.is_contiguous() and lse.shape[2] == q.shape[2] + -q.shape[2] % 32
        rows = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        seen = seen_keys(q, k, v, mask, causal)
        p, _ = probabilities(rows[1], rows[2], scale, seen, lse[..., : q.shape[2]])
        grads = gradients(p, *rows, scale)
        return *(x.transpose(1, 2) for x in grads), None

    library.impl("_scaled_dot_product_efficient_attention", fwd, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", bwd, "CPU")
