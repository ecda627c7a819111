"""The reference of attention: one dense softmax over the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from wf_backends.kernels import Dropout
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.slices import Slice


def visible(mask: Mask, num_rows: int, num_keys: int) -> Tensor:
    """(rows, keys) bool: which query sees which key, pair by pair."""
    rows, keys = torch.arange(num_rows)[:, None], torch.arange(num_keys)[None]
    if mask.slices is not None:
        visible_in_any = torch.zeros(num_rows, num_keys, dtype=torch.bool)
        for part in mask.slices:
            visible_in_any |= _visible_in(part, rows, keys)
        return visible_in_any
    seen = (keys - rows >= -mask.band.left) & (keys - rows <= mask.band.right)
    if mask.cu_seqlens is not None:
        borders = torch.tensor(mask.cu_seqlens)
        seen &= torch.bucketize(rows, borders, right=True) == torch.bucketize(
            keys, borders, right=True
        )
    return seen


def _visible_in(part: Slice, rows: Tensor, keys: Tensor) -> Tensor:
    """(rows, keys) bool: which query sees which key in one slice of a mask."""
    inside = (rows >= part.q[0]) & (rows < part.q[1]) & (keys >= part.k[0]) & (keys < part.k[1])
    return inside & (keys - rows >= -part.left) & (keys - rows <= part.right)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout: Dropout | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v.

    q (b, i, h, d), k and v (b, j, g, d): h query heads, h / g of which share a head of k and v.
    """
    heads_per_kv_head = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads_per_kv_head, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    keys = torch.arange(k.shape[1], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (rows - keys).abs()
    if position_bias is not None:
        farthest = position_bias.shape[1] // 2
        scores = scores + position_bias[:, (keys - rows).clamp(-farthest, farthest) + farthest]
    seen = visible(mask, q.shape[1], k.shape[1]).to(q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].nan_to_num(0.0)  # 0 where a query sees no key
    if dropout is not None:
        kept = dropout.keep_mask(q.shape[0], rows[:, 0], keys)
        weights = weights * (kept.double() / (1 - dropout.p))
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def largest(errors: Iterable[float]) -> float:
    """The largest error, and NaN if one is NaN: `max` drops a NaN behind a number."""
    return max(errors, key=lambda error: (math.isnan(error), error))
