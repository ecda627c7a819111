"""Which kernel calls the rows and keys at hand need: positions + mask -> the fewest tiles.

Pure: standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from wf_backends.mask import CAUSAL, FULL, Band, Bound, Mask
from wf_backends.ranges import (
    Range,
    Ranges,
    globalize,
    intersect,
    join,
    locate,
    shift,
    size,
    span,
    subtract,
)

SHORT = 2048
"""Rows up to which a range is read together with others of the same tile, at the price of a copy:
kernels compute hidden scores along every diagonal, and one long diagonal has fewer of them than
several short ones. Measured in docs/kernels.md."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call: buffer rows x buffer keys, with a Band in the tile's own indices.

    Both are slices of their buffer, read one after another. Trimmed: every row sees a key and
    every key is seen.
    """

    rows: Ranges
    keys: Ranges
    band: Band
    first_on_rows: bool = False
    """Whether nothing was added to the results of these rows before: they may be overwritten."""
    first_on_keys: bool = False
    """The same for the results (gradients) of these keys."""


def tiles(
    q: Ranges, kv: Ranges, mask: Mask, held: tuple[Ranges, Ranges] | None = None
) -> tuple[Tile, ...]:
    """The tiles of the queries at the positions `q` against the keys at `kv`.

    Every (query, key) pair that the mask allows lies in exactly one tile.

    Args:
        held: what the two buffers hold, if more than `q` and `kv`.
    """
    buffers = held or (q, kv)
    return tuple(
        tile
        for rows, keys in _by_document(q, kv, mask)
        for tile in _of_document(rows, keys, mask.band, buffers)
    )


def seen_rows(found: tuple[Tile, ...], q: Ranges) -> Ranges:
    """The query positions that some tile computes."""
    return join(position for tile in found for position in globalize(tile.rows, q))


def seen_keys(found: tuple[Tile, ...], kv: Ranges) -> Ranges:
    """The key positions that some tile reads."""
    return join(position for tile in found for position in globalize(tile.keys, kv))


def area(tile: Tile) -> int:
    """How many scores the tile computes that the mask lets through."""
    num_rows, num_keys = size(tile.rows), size(tile.keys)
    return sum(
        int(min(num_keys - 1, row + tile.band.right) - max(0, row - tile.band.left)) + 1
        for row in range(num_rows)
    )


def _by_document(q: Ranges, kv: Ranges, mask: Mask) -> Iterator[tuple[Ranges, Ranges]]:
    """The parts of q and kv that lie in the same document, document by document."""
    borders = mask.cu_seqlens
    if borders is None:
        yield from [(q, kv)] if q and kv else []
        return
    for document in _touched(q, borders):
        edges = (borders[document], borders[document + 1])
        rows, keys = _clip(q, edges), _clip(kv, edges)
        if rows and keys:
            yield rows, keys


def _touched(ranges: Ranges, borders: tuple[int, ...]) -> list[int]:
    """The numbers of the documents that some range reaches into."""
    numbers: set[int] = set()
    for start, stop in ranges:
        numbers.update(range(bisect_right(borders, start) - 1, bisect_left(borders, stop)))
    return sorted(numbers)


def _clip(ranges: Ranges, edges: Range) -> Ranges:
    lo, hi = edges
    first = max(0, bisect_right(ranges, (lo, inf)) - 1)
    clipped: list[Range] = []
    for start, stop in ranges[first:]:
        if start >= hi:
            break
        if stop > lo:
            clipped.append((max(start, lo), min(stop, hi)))
    return tuple(clipped)


def _of_document(
    rows: Ranges, keys: Ranges, band: Band, held: tuple[Ranges, Ranges]
) -> Iterator[Tile]:
    """The tiles of some rows and some keys of one document.

    Rows that are keys as well see each other as a whole does: under a causal mask, one call.
    """
    both = intersect(rows, keys) if band == CAUSAL else ()
    at, met = (locate(both, buffer) for buffer in held)
    short = max(map(span, both), default=0) <= SHORT
    if len(both) < 2 or not (short or len(at) == len(met) == 1):
        yield from _join_full(_pairs(rows, keys, band, held))
        return
    yield Tile(at, met, CAUSAL)
    rest = _pairs(subtract(rows, both), keys, band, held)
    yield from _join_full(rest + _pairs(both, subtract(keys, both), band, held))


def _pairs(rows: Ranges, keys: Ranges, band: Band, held: tuple[Ranges, Ranges]) -> list[Tile]:
    """One tile for each range of rows and range of keys that see each other at all."""
    found: list[Tile] = []
    q, kv = held
    for row_range in rows:
        ((row_at, _),) = locate((row_range,), q)
        for key_range in keys:
            local = band.shift(key_range[0] - row_range[0])
            if trimmed := _trim(span(row_range), span(key_range), local):
                ((key_at, _),) = locate((key_range,), kv)
                at, met = shift(trimmed.rows, row_at), shift(trimmed.keys, key_at)
                found.append(replace(trimmed, rows=at, keys=met))
    return found


def _trim(num_rows: int, num_keys: int, band: Band) -> Tile | None:
    """The tile without rows that see nothing and keys that nobody sees."""
    first_row = int(max(0, -band.right))
    last_row = int(min(num_rows - 1, num_keys - 1 + band.left))
    if first_row > last_row:
        return None
    first_key = int(max(0, first_row - band.left))
    last_key = int(min(num_keys - 1, last_row + band.right))
    if first_key > last_key:
        return None
    band = band.shift(first_key - first_row)
    rows, keys = last_row - first_row + 1, last_key - first_key + 1
    band = Band(_loosen(band.left, rows), _loosen(band.right, keys))
    return Tile(((first_row, last_row + 1),), ((first_key, last_key + 1),), band)


def _loosen(bound: Bound, length: int) -> Bound:
    """No limit, where the bound cannot cut anything off."""
    return inf if bound >= length - 1 else bound


def _join_full(found: list[Tile]) -> list[Tile]:
    """Join neighbouring full tiles, first along the keys, then along the rows."""
    return _join_along("rows", _join_along("keys", found))


def _join_along(axis: Literal["rows", "keys"], found: list[Tile]) -> list[Tile]:
    """Join full tiles that continue one another along `axis` and agree in the other one."""
    other = "keys" if axis == "rows" else "rows"

    def place(tile: Tile) -> tuple[Ranges, Range]:
        (along,) = getattr(tile, axis)
        return getattr(tile, other), along

    joined: list[Tile] = []
    for tile in sorted(found, key=place):
        across, (start, stop) = place(tile)
        if joined and joined[-1].band == tile.band == FULL:
            last_across, (first, upto) = place(joined[-1])
            if last_across == across and upto == start:
                joined[-1] = replace(joined[-1], **{axis: ((first, stop),)})
                continue
        joined.append(tile)
    return joined
