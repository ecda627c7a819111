"""The band of keys that a query sees around its own position."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

Bound = int | float  # an integer, or math.inf for "no limit"


@dataclass(frozen=True, slots=True)
class Band:
    """A query at position p sees the keys in [p - left, p + right].

    In a tile, bounds are relative to the tile's own indices: row i sees key j if and only if
    -left <= j - i <= right, and either bound may be negative.
    """

    left: Bound = inf
    right: Bound = inf

    def shift(self, offset: int) -> Band:
        """The band in a tile's own indices, if its first key lies `offset` after its first row."""
        return Band(self.left + offset, self.right - offset)

    def within(self, rows: int, keys: int) -> Band:
        """The band with inf for a bound that hides no key in a tile of so many rows and keys."""
        left = inf if self.left >= rows - 1 else self.left
        right = inf if self.right >= keys - 1 else self.right
        return Band(left, right)

    @property
    def edges(self) -> int:
        """How many of the two bounds are finite."""
        return int(self.left < inf) + int(self.right < inf)

    def __str__(self) -> str:
        if self == FULL:
            return "full"
        if self == CAUSAL:
            return "causal"
        return f"band(left={self.left}, right={self.right})"


FULL = Band()
CAUSAL = Band(right=0)
