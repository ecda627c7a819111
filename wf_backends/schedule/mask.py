# pyright: reportUnnecessaryIsInstance=false
"""What a query may see: a Band around it, inside its own document; or slices.

Positions are global token positions.
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
    """Which keys a query sees.

    A mask has numbered parts: its documents, each with the band `band`, or its slices, each with a
    band of its own. `cu_seqlens` are the documents' borders 0 = c0 < c1 < ... = S; None is one
    document. With `slices`, the other two fields are not used: a query sees the keys that any slice
    lets it see, and a query that is in no slice sees none.
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
        """Whether tokens see only a window or their own document."""
        return self.cu_seqlens is not None or self.band.left < inf

    @property
    def is_dense(self) -> bool:
        """Whether queries see all keys, or all up to some: then most rows must travel."""
        return self.slices is None and not self.is_near

    @property
    def looks_back(self) -> bool:
        """Whether no query sees a later key."""
        if self.slices is None:
            return self.band.right <= 0
        return all(slice_.distances[1] <= 0 for slice_ in self.slices)

    def within(self, seqlen: int) -> Mask:
        """The mask with window sides that hide no key of `seqlen` tokens set to unlimited."""
        if self.slices is not None:
            return self
        longest = max(stop - start for start, stop in self.documents(seqlen))
        band = self.band.within(longest, longest)
        return self if band == self.band else Mask(band, self.cu_seqlens)

    def documents(self, stop: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every document of a sequence of `stop` tokens."""
        return tuple(pairwise(self.cu_seqlens)) if self.cu_seqlens else ((0, stop),)

    def band_of(self, part: int) -> Band:
        """The band of a part, by its number."""
        return self.band if self.slices is None else self.slices[part].band

    def check_lengths(self, seqlen: int, num_keys: int) -> None:
        """Raise ValueError for the first slice that ends beyond the queries or the keys."""
        for i, slice_ in enumerate(self.slices or ()):
            for name, (start, stop), length in (("q", slice_.q, seqlen), ("k", slice_.k, num_keys)):
                if stop > length:
                    raise ValueError(
                        f"{name}_ranges: slice {i} ends beyond the sequence of {length} tokens, "
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
    """The mask that a caller describes by arguments of flash-attn, or of MagiAttention for slices.

    Args:
        causal: no query sees a later key.
        window_size: (left, right) in tokens, -1 = unlimited.
        cu_seqlens: document borders as host integers, or None.
        seqlen: global sequence length S that cu_seqlens must end at; None = unchecked.
        q_ranges, k_ranges, attn_mask_types: slices (see `slices.make_slices`), instead of all else.

    Raises:
        ValueError: if causal is not a bool, a window is malformed, cu_seqlens is not 0 = c0 < c1
            < ... = S, or slices are malformed, overlap, or come with one of the first three.
    """
    slice_lists = (q_ranges, k_ranges, attn_mask_types)
    if any(value is not None for value in slice_lists):
        _refuse_beside_slices(causal, window_size, cu_seqlens)
        return Mask(slices=make_slices(*slice_lists))
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    left, right = _bounds(window_size)
    borders = None if cu_seqlens is None else _borders(cu_seqlens, seqlen)
    return Mask(Band(left, min(right, 0) if causal else right), borders)


def _refuse_beside_slices(
    causal: bool, window_size: tuple[int, int], cu_seqlens: Sequence[int] | None
) -> None:
    is_given = {
        "causal": causal,
        "window_size": window_size != (-1, -1),
        "cu_seqlens": cu_seqlens is not None,
    }
    if names := [name for name, given in is_given.items() if given]:
        raise ValueError(
            f"q_ranges, k_ranges and attn_mask_types give the whole mask: leave {names} out; a "
            'causal slice has the type "causal"'
        )


def _bounds(window_size: tuple[int, int]) -> tuple[Bound, Bound]:
    is_pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not is_pair or not all(type(w) is int and w >= -1 for w in window_size):
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
