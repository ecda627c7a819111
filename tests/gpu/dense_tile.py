"""One tile of attention and its gradients, dense, with the conventions of flash-attn 2.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen_in_window(rows: int, keys: int, window: tuple[int, int]) -> Tensor:
    """(i, j): True where the key is in the window of the row, as flash_api.cpp reads it.

    A side of -1, or of at least as many keys as there are, is unlimited. The window counts from the
    bottom right.
    """
    left, right = (-1 if side >= keys else side for side in window)
    if left < 0 and right < 0:
        return torch.ones(rows, keys, dtype=torch.bool)
    left, right = (keys if side < 0 else side for side in (left, right))
    offset = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    return (-left <= offset) & (offset <= right)


def probabilities(
    q: Tensor,
    k: Tensor,
    scale: float,
    seen: Tensor,
    lse: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(exp(scores - lse) (b, h, i, j), lse (b, h, i)) of the keys that are `seen` (i, j).

    Args:
        lse: that of the whole row; None: of the keys of this tile.
    """
    q, k = q.float(), k.float()
    scores = capped_scores(q, k, scale, softcap).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def capped_scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """(b, h, i, j): scale q k^T, soft-capped unless `softcap` is 0."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """(b, i, h, d) from p (b, h, i, j) and v (b, j, g, d)."""
    group = p.shape[1] // v.shape[2]
    return torch.einsum("bhij,bjhd->bihd", p, v.float().repeat_interleave(group, 2))


def gradients(
    p: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of flash-attn's backward, which computes delta from dout and out."""
    assert dout.dtype == out.dtype == q.dtype
    g, group = k.shape[2], q.shape[2] // k.shape[2]
    dtype, (dout, q, k, v, out) = q.dtype, (x.float() for x in (dout, q, k, v, out))
    dp = torch.einsum("bihd,bjhd->bhij", dout, v.repeat_interleave(group, 2))
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    if softcap:
        ds = ds * (1 - (capped_scores(q, k, scale, softcap) / softcap).square())
    dq = torch.einsum("bhij,bjhd->bihd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (g, group)).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", p, dout).unflatten(2, (g, group)).sum(3)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
