"""Dropout that drops the same weights or activations, however they are split over ranks.

Whether a weight is dropped follows from (seed, sample, head, query, key) alone, all of them global
numbers. So no mask is stored, a backward computes the mask of its forward again, and the mask is
the same for every number of ranks, route, layout, head split and tile.

Shapes: b batch, h heads, i query rows, j key rows.
Source: splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195). Number j of a row's
stream is mix(state + j GAMMA); the row's state is mixed from seed, sample, head and query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wf_backends.schedule import Range

RANDOM_BITS = 24  # low bits of a random number that are compared with p
GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, from the golden ratio, as int64


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Zero attention weights with probability p, and scale the others by 1 / (1 - p)."""

    p: float
    """In [0, 1)."""
    seed: int | Tensor | None
    """In [0, 2**63); (1,) int64 if it was drawn on a device; None = not drawn yet."""
    heads: Range
    """The global numbers (start, stop) of the query heads that are computed."""

    def of_heads(self, heads: Range) -> Dropout:
        """The dropout of some of these heads: `heads` (start, stop) counts from the first one."""
        first = self.heads[0]
        return replace(self, heads=(first + heads[0], first + heads[1]))

    def keep_mask(self, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
        """(b, h, i, j) bool: True where a weight is not dropped.

        Args:
            rows: (i,) int64, the queries' global positions. keys: (j,) int64, the keys'.
        """
        assert self.seed is not None, "no seed was drawn"
        samples = torch.arange(batch, device=rows.device)[:, None, None]
        heads = torch.arange(*self.heads, device=rows.device)[:, None]
        return is_kept(self.p, self.seed, (samples, heads, rows), keys)


def position_dropout(x: Tensor, positions: Tensor, p: float, seed: int) -> Tensor:
    """Zero elements of x with probability p and scale the others by 1 / (1 - p).

    The choice follows from seed, sample, global position and channel alone: P ranks drop what one
    rank drops, in any layout, and a layer that the backward runs again drops the same elements.

    Args:
        x: (b, s, d). positions: (s,) or (b, s) int64, the global positions of the rows of x.
        p: in [0, 1).
        seed: a different one for every layer and training step.

    Raises:
        ValueError: for a p outside [0, 1).
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    if p == 0:
        return x
    samples, channels = (torch.arange(n, device=x.device) for n in (x.shape[0], x.shape[2]))
    return x * is_kept(p, seed, (samples[:, None], positions), channels) / (1 - p)


def is_kept(p: float, seed: int | Tensor, rows: Sequence[Tensor], columns: Tensor) -> Tensor:
    """bool, of the shape of the rows and (j,): False with probability p.

    Args:
        rows: int64 numbers that name a row together, such as sample and position; their shapes
            broadcast. columns: (j,) int64.
    """
    state = mix(columns.new_zeros(1) + seed)
    for numbers in rows:
        state = mix(state + numbers)
    random = mix(state[..., None] + columns * GAMMA)
    return (random & ((1 << RANDOM_BITS) - 1)) >= int(p * (1 << RANDOM_BITS))


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on the bits of x (int64); x itself is not changed."""
    x = (x ^ _shift_right(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x shifted to the right as an unsigned number: zeros come in from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
