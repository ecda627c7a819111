# pyright: reportUnnecessaryIsInstance=false
"""What a query may see: a Band around it, inside its own document.

Pure: standard library only. Positions are global token positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import index

Bound = int | float  # an integer, or math.inf for "no limit"


@dataclass(frozen=True, slots=True)
class Band:
    """A query at position p sees the keys in [p - left, p + right].

    In a tile the same words are relative to the tile's own indices: row i sees
    key j if and only if -left <= j - i <= right, and either bound may be negative.
    """

    left: Bound = inf
    right: Bound = inf

    def shift(self, offset: int) -> Band:
        """The same band seen from a tile whose first key lies `offset` after its first row."""
        return Band(self.left + offset, self.right - offset)

    @property
    def edges(self) -> int:
        """How many of its two sides have a limit."""
        return (self.left < inf) + (self.right < inf)

    def sees(self, row: int, key: int) -> bool:
        """Whether the query at `row` sees the key at `key`."""
        return -self.left <= key - row <= self.right

    def __str__(self) -> str:
        if self == FULL:
            return "full"
        if self == CAUSAL:
            return "causal"
        return f"band(left={self.left}, right={self.right})"


FULL = Band()
CAUSAL = Band(right=0)


@dataclass(frozen=True, slots=True)
class Mask:
    """A Band, and the documents that no query looks out of.

    `cu_seqlens` are the documents' borders 0 = c0 < c1 < ... = S; None is one document.
    """

    band: Band = FULL
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        borders = self.cu_seqlens
        band = f"{self.band}"
        if self.band not in (FULL, CAUSAL):
            band = f"window of {self.band.left} tokens to the left, {self.band.right} to the right"
        return band if borders is None else f"{band}, documents with borders {[*borders]}"

    @property
    def is_near(self) -> bool:
        """Whether tokens see no further than a window or their document."""
        return self.cu_seqlens is not None or self.band.left < inf

    def within(self, seqlen: int) -> Mask:
        """The mask for a sequence of `seqlen` tokens: windows that reach over all are none."""
        longest = max(stop - start for start, stop in self.documents(seqlen))
        sides = (inf if side >= longest - 1 else side for side in (self.band.left, self.band.right))
        band = Band(*sides)
        return self if band == self.band else Mask(band, self.cu_seqlens)

    def documents(self, stop: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every document of a sequence of `stop` tokens."""
        return tuple(pairwise(self.cu_seqlens)) if self.cu_seqlens else ((0, stop),)


def make_mask(
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | None = None,
    seqlen: int | None = None,
) -> Mask:
    """The public words for a mask (flash-attn's) as a Mask.

    Args:
        causal: no query sees a later key.
        window_size: (left, right) in tokens, -1 = unlimited.
        cu_seqlens: document borders as host integers, or None.
        seqlen: global sequence length S that cu_seqlens must end at; None = unchecked.

    Raises:
        ValueError: if a window is malformed or cu_seqlens is not 0 = c0 < c1 < ... = S.
    """
    left, right = _bounds(window_size)
    borders = None if cu_seqlens is None else _borders(cu_seqlens, seqlen)
    return Mask(Band(left, min(right, 0) if causal else right), borders)


def _bounds(window_size: tuple[int, int]) -> tuple[Bound, Bound]:
    pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not pair or not all(isinstance(w, int) and w >= -1 for w in window_size):
        raise ValueError(
            f"window_size must be (left, right) in tokens, -1 = unlimited; got {window_size!r}"
        )
    left, right = (inf if w == -1 else w for w in window_size)
    return left, right


def _borders(cu_seqlens: Sequence[int], seqlen: int | None) -> tuple[int, ...]:
    if hasattr(cu_seqlens, "is_cuda"):  # a tensor would hide a device synchronisation
        raise ValueError(
            "cu_seqlens must be host integers; pass cu_seqlens.tolist() once per batch"
        )
    try:
        borders = tuple(index(c) for c in cu_seqlens)
    except TypeError:
        raise ValueError(f"cu_seqlens must be host integers, got {cu_seqlens!r}") from None
    rising = all(a < b for a, b in pairwise(borders))
    if len(borders) < 2 or borders[0] != 0 or not rising:
        raise ValueError(f"cu_seqlens must be 0 = c0 < c1 < ... = S, got {borders}")
    if seqlen is not None and borders[-1] != seqlen:
        raise ValueError(f"cu_seqlens must end at the sequence length {seqlen}, got {borders[-1]}")
    return borders
