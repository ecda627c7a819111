"""The rule for scaled dot-product attention; query, key, value: (..., heads, rows, head_dim)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import fx

from wf_backends.slicing.call import Call, Reads, Rows, Rule, Slice, Table, aten, broadcast

ROWS, HEADS = 2, 3  # dimensions counted from the end, from 1


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
    if new.call["is_causal"] and len(new.call.shape) - new.dim == ROWS:
        return write_causal_rows(new)
    return new.again()


def write_causal_rows(new: Slice) -> fx.Node:
    """Rows [lo, hi) see keys [0, hi); the first rows of all are causal attention again."""
    key, value = (
        new.put(aten.slice.Tensor, new.given[name], -ROWS, 0, new.hi) for name in ("key", "value")
    )
    if new.lo == 0:
        return new.again(key=key, value=value)
    device = new.call["query"].meta["val"].device
    size = (new.hi - new.lo, new.hi)
    seen = new.put(aten.ones.default, size, dtype=torch.bool, device=device)
    mask = new.put(aten.tril.default, seen, new.lo)
    return new.again(key=key, value=value, attn_mask=mask, is_causal=False)


TABLE: Table = {aten.scaled_dot_product_attention: Rule(attention, write_attention)}
