# pyright: reportUnnecessaryIsInstance=false
"""What a query may see: a Band around it, inside its own document; or slices.

Pure: standard library only. Positions are global token positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import index
from typing import Any

from wf_backends.schedule.band import CAUSAL, FULL, Band, Bound
from wf_backends.schedule.slices import Slice, make_slices, refuse_tensor


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees, in parts: one part, one for each document, or slices.

    `cu_seqlens` are the documents' borders 0 = c0 < c1 < ... = S; None is one document. `slices`
    take the place of both: a query sees what it sees in any of them, and nothing if it is in none.
    """

    band: Band = FULL
    cu_seqlens: tuple[int, ...] | None = None
    slices: tuple[Slice, ...] | None = None

    def __str__(self) -> str:
        if self.slices is not None:
            return f"slices: {'; '.join(map(str, self.slices))}"
        band = str(self.band)
        if self.band not in (FULL, CAUSAL):
            band = f"window of {self.band.left} tokens to the left, {self.band.right} to the right"
        return band + (f", documents with borders {[*self.cu_seqlens]}" if self.cu_seqlens else "")

    @property
    def is_near(self) -> bool:
        """Whether tokens see no further than a window or their document."""
        return self.cu_seqlens is not None or self.band.left < inf

    @property
    def is_dense(self) -> bool:
        """Whether queries see all keys, or all up to some: few rows are spared a way."""
        return self.slices is None and not self.is_near

    @property
    def looks_back(self) -> bool:
        """Whether no query sees a later key."""
        if self.slices is None:
            return self.band.right <= 0
        return all(one.distances[1] <= 0 for one in self.slices)

    def within(self, seqlen: int) -> Mask:
        """The mask for a sequence of `seqlen` tokens: windows that reach over all are none."""
        if self.slices is not None:
            return self
        longest = max(stop - start for start, stop in self.documents(seqlen))
        sides = (inf if side >= longest - 1 else side for side in (self.band.left, self.band.right))
        band = Band(*sides)
        return self if band == self.band else Mask(band, self.cu_seqlens)

    def documents(self, stop: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every document of a sequence of `stop` tokens."""
        return tuple(pairwise(self.cu_seqlens)) if self.cu_seqlens else ((0, stop),)

    def band_of(self, part: int) -> Band:
        """The band of a part, by its number: of a document or a slice."""
        return self.band if self.slices is None else self.slices[part].band

    def check_lengths(self, seqlen: int, num_keys: int) -> None:
        """Refuse slices that reach beyond the queries or keys; ValueError that names the first."""
        for at, one in enumerate(self.slices or ()):
            for name, (start, stop), length in (("q", one.q, seqlen), ("k", one.k, num_keys)):
                if stop > length:
                    raise ValueError(
                        f"{name}_ranges: slice {at} ends beyond the sequence of {length} tokens, "
                        f"got ({start}, {stop})"
                    )


def make_mask(
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | None = None,
    seqlen: int | None = None,
    q_ranges: Any = None,
    k_ranges: Any = None,
    attn_mask_types: Any = None,
) -> Mask:
    """The public words for a mask (flash-attn's, and MagiAttention's for slices) as a Mask.

    Args:
        causal: no query sees a later key.
        window_size: (left, right) in tokens, -1 = unlimited.
        cu_seqlens: document borders as host integers, or None.
        seqlen: global sequence length S that cu_seqlens must end at; None = unchecked.
        q_ranges, k_ranges, attn_mask_types: slices, see `slices.make_slices`; in place of the rest.

    Raises:
        ValueError: if causal is no bool, a window is malformed, cu_seqlens is not 0 = c0 < c1 < ...
            = S, or slices are malformed, overlap or come with causal, window_size or cu_seqlens.
    """
    words = (q_ranges, k_ranges, attn_mask_types)
    if any(value is not None for value in words):
        _refuse_beside_slices(causal, window_size, cu_seqlens)
        return Mask(slices=make_slices(*words))
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    left, right = _bounds(window_size)
    borders = None if cu_seqlens is None else _borders(cu_seqlens, seqlen)
    return Mask(Band(left, min(right, 0) if causal else right), borders)


def _refuse_beside_slices(
    causal: bool, window_size: tuple[int, int], cu_seqlens: Sequence[int] | None
) -> None:
    given = {"causal": causal, "window_size": window_size != (-1, -1)}
    given |= {"cu_seqlens": cu_seqlens is not None}
    if beside := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"q_ranges, k_ranges and attn_mask_types say all of the mask: leave {beside} out, and "
            'give a slice the type "causal" where it is'
        )


def _bounds(window_size: tuple[int, int]) -> tuple[Bound, Bound]:
    pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not pair or not all(type(w) is int and w >= -1 for w in window_size):
        raise ValueError(
            f"window_size must be (left, right) in tokens, -1 = unlimited; got {window_size!r}"
        )
    left, right = (inf if w == -1 else w for w in window_size)
    return left, right


def _borders(cu_seqlens: Sequence[int], seqlen: int | None) -> tuple[int, ...]:
    refuse_tensor("cu_seqlens", cu_seqlens)
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
