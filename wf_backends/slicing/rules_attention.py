"""The rule for scaled dot-product attention; query, key, value: (..., heads, rows, head_dim)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, fx

from wf_backends.kernels import CUDNN_MULTIPLE, KERNELS, KernelSpec, Scores, merge
from wf_backends.schedule import CAUSAL, FULL, Band
from wf_backends.slicing.call import Call, Reads, Rows, Rule, Slice, Table, aten, broadcast

ROWS, HEADS = 2, 3  # dimensions counted from the end, from 1
CAUSAL_FROM_THE_LAST_KEY = 2
"""torch's CustomMaskType::CausalFromBottomRight (native/transformers/cuda/sdp_utils.h)."""


def attention(call: Call, dim: int) -> Reads | None:
    """By batch, heads or query rows; the keys of a query row are needed whole."""
    from_end = len(call.shape) - dim
    if call["dropout_p"] > 0 or from_end < ROWS:
        return None
    square = call.size("query")[-ROWS] == call.size("key")[-ROWS]
    if from_end == ROWS and call["is_causal"] and not square:
        return None
    mask = broadcast(call.size("attn_mask"), dim, call.shape) if call.has("attn_mask") else None
    reads: dict[str, Rows | None] = {
        "query": broadcast(call.size("query"), dim, call.shape),
        "attn_mask": mask,
    }
    if from_end > ROWS:
        grouped = call["enable_gqa"] and from_end == HEADS
        reads |= {name: keys(call.size(name), dim, call, grouped) for name in ("key", "value")}
    return reads


def keys(size: tuple[int, ...], dim: int, call: Call, grouped: bool) -> Rows | None:
    """Keys or values of a slice of the batch or the heads; query heads may share one of theirs."""
    if grouped and size[-HEADS] > 1:
        return Rows(dim, Fraction(size[-HEADS], call.shape[dim]))
    return broadcast(size, dim, call.shape)


def write_attention(new: Slice) -> fx.Node:
    """Causal rows [lo, hi) see keys [0, hi)."""
    if not new.call["is_causal"] or len(new.call.shape) - new.dim != ROWS:
        return new.again()
    key, value = (
        new.put(aten.slice.Tensor, new.given[name], -ROWS, 0, new.hi) for name in ("key", "value")
    )
    if new.lo == 0:  # causal attention again
        return new.again(key=key, value=value)
    if _has_kernel(new.call):
        return new.put(attend_rows, new.given["query"], key, value, new.lo, new.call["scale"])
    size, device = (new.hi - new.lo, new.hi), new.call["query"].meta["val"].device
    seen = new.put(aten.ones.default, size, dtype=torch.bool, device=device)
    mask = new.put(aten.tril.default, seen, new.lo)
    return new.again(key=key, value=value, attn_mask=mask, is_causal=False)


def _has_kernel(call: Call) -> bool:
    """Whether torch has an operator here that `attend_rows` can use."""
    query, heads = call["query"].meta["val"], call.size("key")[-HEADS]
    spec = KernelSpec(
        device=query.device.type,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        heads=query.shape[-HEADS],
        kv_heads=heads,
        value_dim=call.size("value")[-1],
    )
    takes = KERNELS["sdpa"]().refuses(spec) is None or _is_for_efficient(spec)
    return query.ndim == 4 and takes


def _is_for_efficient(spec: KernelSpec) -> bool:
    """Whether torch's memory-efficient kernel takes it, as float32 on CUDA."""
    aligned = spec.head_dim % 4 == 0 == (spec.value_dim or 0) % 4
    on_cuda = spec.device == "cuda" and torch.version.hip is None
    return on_cuda and spec.dtype is torch.float32 and aligned


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, before: int, scale: float | None
) -> Tensor:
    """Causal attention of rows behind `before` others: to the keys before, which all of them see,
    and to their own, merged. No mask of rows x keys is made. On CUDA one call does both, but for
    tiles that cuDNN may compute.

    Args:
        query: (b, h, i, d). key, value: (b, g, before + i, d), g divides h.

    Returns:
        (b, h, i, d).
    """
    kernel, scores = KERNELS["sdpa"](), Scores(query.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if query.is_cuda:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if q.dtype is torch.float32:
            return _attend_efficiently(q, k, v, scores.scale).transpose(1, 2)
        if q.shape[1] % CUDNN_MULTIPLE or before % CUDNN_MULTIPLE:
            return kernel.forward(q, k, v, scores, Band(right=before))[0].transpose(1, 2)
    (early_k, k), (early_v, v) = (x.split((before, q.shape[1]), 1) for x in (k, v))
    out, lse = kernel.forward(q, k, v, scores, CAUSAL)
    early, early_lse = kernel.forward(q, early_k, early_v, scores, FULL)
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    lse = lse.to(out.dtype)  # torch 2.11 has float32 for a fake one of float64
    merge(out, lse.transpose(1, 2), early, early_lse.transpose(1, 2))
    return out.to(query.dtype).transpose(1, 2)


def _attend_efficiently(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """By torch's memory-efficient kernel, which takes as many key heads as query heads."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    options = 0.0, CAUSAL_FROM_THE_LAST_KEY
    return aten._efficient_attention_forward.default(
        q, k, v, None, None, None, None, None, *options, scale=scale
    )[0]


TABLE: Table = {aten.scaled_dot_product_attention: Rule(attention, write_attention)}
