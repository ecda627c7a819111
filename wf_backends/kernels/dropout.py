"""Dropout that drops the same weights or activations, however they are split over ranks.

Whether a weight is dropped follows from (seed, sample, head, query, key) alone, all of them global
numbers. So no mask is stored, a backward computes the mask of its forward again, and the mask is
the same for every number of ranks, route, layout, head split and tile.

Shapes: b batch, h heads, i query rows, j key rows.
Source: splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195). Number j of a row's
stream is mix(state + j GAMMA); the row's state is mixed from seed, sample, head and query.
"""

from __future__ import annotations

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

    def factors(self, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
        """(b, h, i, j) float64: the factors of the attention weights, 0 or 1 / (1 - p).

        Args:
            rows: (i,) int64, the queries' global positions. keys: (j,) int64, the keys'.
        """
        return self.keep_mask(batch, rows, keys).double() / (1 - self.p)

    def keep_mask(self, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
        """(b, h, i, j) bool: True where a weight is not dropped; arguments as in `factors`."""
        assert self.seed is not None, "no seed was drawn"
        samples = torch.arange(batch, device=rows.device)[:, None, None]
        heads = torch.arange(*self.heads, device=rows.device)[:, None]
        state = mix(rows.new_zeros(1) + self.seed)
        for number in (samples, heads, rows):
            state = mix(state + number)
        return is_kept(mix(state[..., None] + keys * GAMMA), self.p)


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
    rows = mix(mix(samples + seed)[:, None] + positions)
    return x * is_kept(mix(rows[..., None] + channels), p) / (1 - p)


def is_kept(random: Tensor, p: float) -> Tensor:
    """bool, of the shape of `random`: False with probability p. `random` is int64 from `mix`."""
    return (random & ((1 << RANDOM_BITS) - 1)) >= int(p * (1 << RANDOM_BITS))


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on the bits of x (int64); x itself is not changed."""
    x = (x ^ _shift_right(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x shifted to the right as an unsigned number: zeros come in from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
