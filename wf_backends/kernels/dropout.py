"""Dropout that falls on the same weights or activations, however they are split.

Whether a weight is dropped is a function of (seed, sample, head, query, key) alone, all of them
global: nothing is stored, a backward draws again what its forward drew, and so does every rank,
route, layout, head split and tile.

Shapes: b batch, h heads, i query rows, j key rows.
Source: splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195). Number j of a row's
stream is mix(state + j GAMMA); the row's state is mixed from seed, sample, head and query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wf_backends.schedule import Range

RANDOM_BITS = 24  # of the numbers drawn, compared with p
GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, of the golden ratio, as int64


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Zero attention weights with probability p, and scale the others by 1 / (1 - p)."""

    p: float
    """In [0, 1)."""
    seed: int | Tensor | None
    """In [0, 2**63), or (1,) int64 where it was drawn on a device; None = not drawn yet."""
    heads: Range
    """The global numbers of the query heads at hand."""

    def of_heads(self, heads: Range) -> Dropout:
        """That of the heads start to stop of the heads at hand."""
        first = self.heads[0]
        return replace(self, heads=(first + heads[0], first + heads[1]))

    def factors(self, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
        """(b, h, i, j) float64: what weights are multiplied by, 0 or 1 / (1 - p).

        Args:
            rows: (i,) int64, global positions of the queries. keys: (j,), those of the keys.
        """
        return self.kept(batch, rows, keys) / (1 - self.p)

    def kept(self, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
        """(b, h, i, j) bool: which weights are not dropped; see `factors`."""
        samples = torch.arange(batch, device=rows.device)[:, None, None]
        heads = torch.arange(*self.heads, device=rows.device)[:, None]
        return keeps(mix(self._mixed(samples, heads, rows)[..., None] + keys * GAMMA), self.p)

    def seeds(self, batch: int, row: Tensor, key: Tensor) -> Tensor:
        """(b,) int64, not negative: of a generator for each sample of a tile that begins here.

        Args:
            row: () int64, the global position of the tile's first query. key: of its first key.
        """
        samples = torch.arange(batch, device=row.device)
        return self._mixed(samples, row, key).bitwise_and_((1 << 63) - 1)

    def _mixed(self, *numbers: Tensor) -> Tensor:
        """int64 of the seed and these numbers, which are broadcast."""
        assert self.seed is not None, "no seed was drawn"
        state = mix(numbers[0].new_zeros(1) + self.seed)
        for number in numbers:
            state = mix(state + number)
        return state


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


def keeps(random: Tensor, p: float) -> Tensor:
    """Whether what has this random number, by `mix`, is not dropped with probability p."""
    return (random & ((1 << RANDOM_BITS) - 1)) >= int(p * (1 << RANDOM_BITS))


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, on the bits of int64; x is left as it is."""
    x = (x ^ _shift(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = x.bitwise_xor_(_shift(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
