"""Dropout that falls on the same elements however a sequence is spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

RANDOM_BITS = 24  # of the numbers drawn, compared with p


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
    rows = _hash(_hash(samples + seed)[:, None] + positions)
    drawn = _hash(rows[..., None] + channels) & ((1 << RANDOM_BITS) - 1)
    return x * (drawn >= int(p * (1 << RANDOM_BITS))) / (1 - p)


def _hash(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, on the bits of int64 (Steele et al. 2014)."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
