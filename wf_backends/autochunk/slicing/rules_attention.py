"""The rule for scaled dot-product attention; query, key, value: (..., heads, rows, head_dim)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, fx

from wf_backends.autochunk.slicing.call import (
    Call,
    Reads,
    Rows,
    RowSlice,
    Rule,
    Table,
    aten,
    broadcast,
    shape_of,
)
from wf_backends.kernels import KERNELS, KernelSpec, Scores
from wf_backends.schedule import Band

ROWS, HEADS = 2, 3  # these dimensions are -ROWS and -HEADS
# torch's CustomMaskType::CausalFromBottomRight (native/transformers/cuda/sdp_utils.h)
CAUSAL_FROM_BOTTOM_RIGHT = 2


def attention(call: Call, dim: int) -> Reads | None:
    """Sliced along batch, heads or query rows; a slice of query rows reads all keys and values."""
    from_end = len(call.shape) - dim
    if call["dropout_p"] > 0 or from_end < ROWS:
        return None
    square = call.size("query")[-ROWS] == call.size("key")[-ROWS]
    if from_end == ROWS and call["is_causal"] and not square:
        return None
    names = ("query", "attn_mask")
    reads = {name: broadcast(shape_of(call[name]), dim, call.shape) for name in names}
    if from_end > ROWS:
        grouped = call["enable_gqa"] and from_end == HEADS
        reads |= {name: key_reads(call.size(name), dim, call, grouped) for name in ("key", "value")}
    return reads


def key_reads(size: tuple[int, ...], dim: int, call: Call, grouped: bool) -> Rows | None:
    """What a slice of the batch or the heads reads of keys or values of shape `size`; `grouped`: of
    the heads, several of which share a key head."""
    if grouped and size[-HEADS] > 1:
        return Rows(dim, Fraction(size[-HEADS], call.shape[dim]))
    return broadcast(size, dim, call.shape)


def write_attention(slice_: RowSlice) -> fx.Node:
    """Attention of a slice; causal rows [lo, hi) get keys [0, hi) alone."""
    if not slice_.call["is_causal"] or len(slice_.call.shape) - slice_.dim != ROWS:
        return slice_.call_same()
    key, value = (
        slice_.call_function(aten.slice.Tensor, slice_.arguments[name], -ROWS, 0, slice_.hi)
        for name in ("key", "value")
    )
    if slice_.lo == 0:  # as many keys as rows: causal attention as it is
        return slice_.call_same(key=key, value=value)
    if _supports_attend_rows(slice_.call):
        return slice_.call_function(
            attend_rows, slice_.arguments["query"], key, value, slice_.lo, slice_.call["scale"]
        )
    size, device = (slice_.hi - slice_.lo, slice_.hi), slice_.call["query"].meta["val"].device
    ones = slice_.call_function(aten.ones.default, size, dtype=torch.bool, device=device)
    mask = slice_.call_function(aten.tril.default, ones, slice_.lo)
    return slice_.call_same(key=key, value=value, attn_mask=mask, is_causal=False)


def _supports_attend_rows(call: Call) -> bool:
    """Whether torch has a kernel for these tensors and this device that `attend_rows` can call.

    None broadcasts keys to the queries' batch, or to the heads of the values.
    """
    query = call["query"].meta["val"]
    # Each is (batch, heads); tensors without a batch have (heads,).
    queries, keys, values = (call.size(name)[:-ROWS] for name in ("query", "key", "value"))
    if len(queries) != 2 or keys != values or keys[:-1] != queries[:-1]:
        return False
    spec = KernelSpec(
        device=query.device.type,
        dtype=_autocast_dtype(query),
        head_dim=query.shape[-1],
        heads=query.shape[-HEADS],
        kv_heads=call.size("key")[-HEADS],
        value_dim=call.size("value")[-1],
    )
    return KERNELS["sdpa"]().refuses(spec) is None or _is_for_memory_efficient(spec)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype to which autocast casts an input of torch's fused attention; else x's own."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _is_for_memory_efficient(spec: KernelSpec) -> bool:
    """Whether torch's memory-efficient kernel computes it: aligned float32 on CUDA."""
    aligned = spec.head_dim % 4 == 0 and (spec.value_dim or 0) % 4 == 0
    on_cuda = spec.device == "cuda" and torch.version.hip is None
    return on_cuda and spec.dtype is torch.float32 and aligned


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, before: int, scale: float | None
) -> Tensor:
    """Causal attention (b, h, i, d) of rows [before, before + i), without a mask of rows x keys.

    Args:
        query: (b, h, i, d). key, value: (b, g, before + i, d), g divides h.
    """
    scores = Scores(query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = (x.to(_autocast_dtype(x)) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if query.is_cuda:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if q.dtype is torch.float32:
            return _memory_efficient(q, k, v, scores.scale).transpose(1, 2)
    out, _ = KERNELS["sdpa"]().forward(q, k, v, scores, Band(right=before))
    return out.to(query.dtype).transpose(1, 2)


def _memory_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `attend_rows`, by torch's memory-efficient kernel, which needs a key head for each query
    head. q: (b, i, h, d). k, v: (b, before + i, g, d)."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    dropout_p, mask_type = 0.0, CAUSAL_FROM_BOTTOM_RIGHT
    return aten._efficient_attention_forward.default(
        q, k, v, None, None, None, None, None, dropout_p, mask_type, scale=scale
    )[0]


TABLE: Table = {aten.scaled_dot_product_attention: Rule(attention, write_attention)}
