"""Dropout that falls on the same elements however a sequence is spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.kernels import keeps, mix


def position_dropout(x: Tensor, positions: Tensor, p: float, seed: int) -> Tensor:
    """Zero elements of x with probability p and scale the others by 1 / (1 - p).

    Which ones depends on seed, sample, global position and channel alone, so that P ranks drop
    what one rank drops, in any layout, and again when a layer is run again in the backward.

    Args:
        x: (b, s, d). positions: (s,) or (b, s) int64, the global positions of its rows.
        p: in [0, 1).
        seed: another one for every layer and step.

    Raises:
        ValueError: for a p outside [0, 1).
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    if p == 0:
        return x
    samples, channels = (torch.arange(n, device=x.device) for n in (x.shape[0], x.shape[2]))
    rows = mix(mix(samples + seed)[:, None] + positions)
    return x * keeps(mix(rows[..., None] + channels), p) / (1 - p)
