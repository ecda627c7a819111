"""Divides queries, keys and a mask into tiles: as few kernel calls as possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import inf
from typing import Literal

from wf_backends.schedule import (
    CAUSAL,
    FULL,
    Band,
    Mask,
    Range,
    Ranges,
    Slice,
    globalize,
    intersect,
    join,
    locate,
    range_length,
    subtract,
)

SHORT_RANGE_ROWS = 2048
"""Up to this length, several ranges of rows become one tile, although that copies them. Kernels
compute hidden scores along every diagonal: one long diagonal has fewer of them than several short
ones. Measured in docs/internals/kernels.md."""

Buffers = tuple[Ranges, Ranges]  # the positions that a buffer of rows and a buffer of keys hold
Parts = Mapping[int, Ranges]
"""Part of the mask (the index of a document or slice) -> the positions of rows or keys in it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call: rows of one buffer, keys of another, and a band in the tile's own indices.

    `rows` and `keys` are slices of their buffers, which the kernel reads as if concatenated. Every
    row sees some key, and every key is seen by some row.
    """

    rows: Ranges
    keys: Ranges
    band: Band
    first_on_rows: bool = False
    """Whether no earlier tile has results for these rows, so that results are overwritten."""
    first_on_keys: bool = False
    """The same for results (gradients) of the keys."""
    held: Buffers = ((), ())

    @property
    def positions(self) -> tuple[Ranges, Ranges]:
        """The global positions of (rows, keys), in the tile's order."""
        return globalize(self.rows, self.held[0]), globalize(self.keys, self.held[1])


def make_tiles(
    q: Ranges, kv: Ranges, mask: Mask, held: Buffers | None = None, joins_ranges: bool = True
) -> tuple[Tile, ...]:
    """The tiles for queries at the positions `q` and keys at the positions `kv`.

    Every (query, key) pair that the mask lets through lies in exactly one tile.

    Args:
        held: the positions in both buffers, if not `q` and `kv`.
        joins_ranges: whether several ranges of rows may be one causal tile.
    """
    buffers = held or (q, kv)
    rows, keys = by_part(q, mask, "q"), by_part(kv, mask, "k")
    all_tiles = list[Tile]()
    for part in rows.keys() & keys.keys():
        one_part = rows[part], keys[part], mask.band_of(part), buffers
        all_tiles += _tiles_of_part(*one_part, joins_ranges)
    return tuple(_join_full_tiles(all_tiles))


def seen(q: Parts, kv: Parts, mask: Mask) -> tuple[Ranges, Ranges]:
    """The positions in `q` that see some key in `kv`, and those in `kv` that some query sees.

    These are the positions of all tiles, computed without making tiles.
    """
    parts = q.keys() & kv.keys()
    pairs = [pair for i in parts for pair in _trimmed_pairs(q[i], kv[i], mask.band_of(i))]
    return join([rows for rows, _ in pairs]), join([keys for _, keys in pairs])


def by_part(ranges: Ranges, mask: Mask, side: Literal["q", "k"]) -> Parts:
    """The positions of queries or of keys, by part of the mask; parts without any are left out."""
    if not ranges:
        return {}
    if mask.slices is not None:
        limits, order, starts, reached = _by_start(mask.slices, side)
        near = set[int]()
        for start, stop in ranges:
            near.update(order[bisect_right(reached, start) : bisect_left(starts, stop)])
        return {i: inside for i in sorted(near) if (inside := _clip(ranges, limits[i]))}
    borders = mask.cu_seqlens
    if borders is None:
        return {0: ranges}
    documents = set[int]()
    for start, stop in ranges:
        documents.update(range(bisect_right(borders, start) - 1, bisect_left(borders, stop)))
    return {i: _clip(ranges, borders[i : i + 2]) for i in sorted(documents)}


@lru_cache(maxsize=64)
def _by_start(
    slices: tuple[Slice, ...], side: Literal["q", "k"]
) -> tuple[list[Range], list[int], list[int], list[int]]:
    """The limits of slices on a side; and their indices, starts and the largest stop so far, in the
    order of their starts."""
    limits: list[Range] = [getattr(slice_, side) for slice_ in slices]
    order = sorted(range(len(limits)), key=limits.__getitem__)
    starts, stops = ([limits[i][end] for i in order] for end in (0, 1))
    return limits, order, starts, [*accumulate(stops, max)]


def _clip(ranges: Ranges, limits: Sequence[int]) -> Ranges:
    """The parts of the ranges inside (start, stop) limits."""
    lo, hi = limits
    if lo <= ranges[0][0] and ranges[-1][1] <= hi:
        return ranges
    first = max(0, bisect_right(ranges, (lo, inf)) - 1)
    near = ranges[first : bisect_left(ranges, (hi,))]
    return tuple([(max(start, lo), min(stop, hi)) for start, stop in near if stop > lo])


def _tiles_of_part(
    rows: Ranges, keys: Ranges, band: Band, held: Buffers, joins_ranges: bool
) -> Iterator[Tile]:
    """The tiles of rows and keys of one part of the mask.

    Under a causal mask, all positions that are both rows and keys can be one causal tile.
    """
    both = intersect(rows, keys) if band == CAUSAL and joins_ranges else ()
    both_rows, both_keys = (locate(both, buffer) for buffer in held)
    is_short = max(map(range_length, both), default=0) <= SHORT_RANGE_ROWS
    needs_no_copy = len(both_rows) == len(both_keys) == 1
    if len(both) < 2 or not (is_short or needs_no_copy):
        yield from _tiles_of_pairs(rows, keys, band, held)
        return
    yield Tile(both_rows, both_keys, CAUSAL)
    yield from _tiles_of_pairs(subtract(rows, both), keys, band, held)
    yield from _tiles_of_pairs(both, subtract(keys, both), band, held)


def _tiles_of_pairs(rows: Ranges, keys: Ranges, band: Band, held: Buffers) -> Iterator[Tile]:
    """A tile for each pair of a range of rows and a range of keys in which any row sees a key."""
    q, kv = held
    for pair in _trimmed_pairs(rows, keys, band):
        (first_row, _), (first_key, _) = pair
        trimmed = band.shift(first_key - first_row).within(*map(range_length, pair))
        yield Tile(locate(pair[:1], q), locate(pair[1:], kv), trimmed)


def _trimmed_pairs(rows: Ranges, keys: Ranges, band: Band) -> Iterator[tuple[Range, Range]]:
    """For each range of rows and of keys: the rows that see any of these keys, and the keys that
    any of these rows sees. Pairs of ranges without any are left out."""
    left, right = band.left, band.right
    for (row, row_stop), (key, key_stop) in product(rows, keys):
        if row - left < key_stop and key - right < row_stop:
            first, stop = max(row, key - right), min(row_stop, key_stop + left)
            begin, end = max(key, first - left), min(key_stop, stop + right)
            if begin < end:
                yield (int(first), int(stop)), (int(begin), int(end))


def _join_full_tiles(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles that are neighbours, first along the keys, then along the rows.

    Tiles of several ranges come first: they may then overwrite the results of all their rows.
    """
    pairs = ((tile.keys, tile.rows) for tile in tiles if tile.band == FULL)
    full = [Tile(rows, keys, FULL) for keys, rows in _join_first(_join_first(pairs))]
    others = [tile for tile in tiles if tile.band != FULL]
    return sorted(
        others + full, key=lambda tile: (-len(tile.rows + tile.keys), tile.keys, tile.rows)
    )


def _join_first(pairs: Iterable[tuple[Ranges, Ranges]]) -> Iterator[tuple[Ranges, Ranges]]:
    """For pairs with an equal second: (second, a range of all their firsts, joined)."""
    firsts_by_second = defaultdict[Ranges, list[Range]](list)
    for first, second in pairs:
        firsts_by_second[second] += first
    for second, firsts in firsts_by_second.items():
        yield from ((second, (piece,)) for piece in join(firsts))
