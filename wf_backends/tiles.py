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
from wf_backends.ranges import Range, Ranges, globalize, join, locate, size


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call: buffer rows x buffer keys, with a Band in the tile's own indices.

    Trimmed: every row sees a key and every key is seen.
    """

    rows: Range
    keys: Range
    band: Band
    first_on_rows: bool = False
    """Whether nothing was added to the results of these rows before: they may be overwritten."""
    first_on_keys: bool = False
    """The same for the results (gradients) of these keys."""


def tiles(q: Ranges, kv: Ranges, mask: Mask) -> tuple[Tile, ...]:
    """The tiles of a buffer that holds the positions `q` against one that holds `kv`.

    Every (query, key) pair that the mask allows lies in exactly one tile.
    """
    found: list[Tile] = []
    for rows, keys in _by_document(q, kv, mask):
        if mask.band == CAUSAL and rows == keys:  # sorted rows and keys: one call covers all
            found.append(Tile(_span(rows, q), _span(keys, kv), CAUSAL))
        else:
            found += _join_full(_pairs(rows, q, keys, kv, mask.band))
    return tuple(found)


def seen_rows(found: tuple[Tile, ...], q: Ranges) -> Ranges:
    """The query positions that some tile computes."""
    return join(piece for tile in found for piece in globalize(tile.rows, q))


def seen_keys(found: tuple[Tile, ...], kv: Ranges) -> Ranges:
    """The key positions that some tile reads."""
    return join(piece for tile in found for piece in globalize(tile.keys, kv))


def area(tile: Tile) -> int:
    """How many scores the tile computes that the mask lets through."""
    num_rows, num_keys = size([tile.rows]), size([tile.keys])
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


def _span(piece: Ranges, held: Ranges) -> Range:
    """The buffer rows of a document's piece: they are neighbours in sequence order."""
    local = locate(piece, held)
    assert len(local) == 1, f"{piece} does not lie in one stretch of {held}"
    return local[0]


def _pairs(rows: Ranges, q: Ranges, keys: Ranges, kv: Ranges, band: Band) -> list[Tile]:
    """One tile for each range of rows and range of keys that see each other at all."""
    found: list[Tile] = []
    for row_range in rows:
        row_at = locate((row_range,), q)[0][0]
        for key_range in keys:
            local = band.shift(key_range[0] - row_range[0])
            lengths = (row_range[1] - row_range[0], key_range[1] - key_range[0])
            if trimmed := _trim(*lengths, local):
                key_at = locate((key_range,), kv)[0][0]
                found.append(_moved(trimmed, row_at, key_at))
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
    return Tile((first_row, last_row + 1), (first_key, last_key + 1), band)


def _loosen(bound: Bound, length: int) -> Bound:
    """No limit, where the bound cannot cut anything off."""
    return inf if bound >= length - 1 else bound


def _moved(tile: Tile, row_at: int, key_at: int) -> Tile:
    rows = (tile.rows[0] + row_at, tile.rows[1] + row_at)
    keys = (tile.keys[0] + key_at, tile.keys[1] + key_at)
    return Tile(rows, keys, tile.band)


def _join_full(found: list[Tile]) -> list[Tile]:
    """Join neighbouring full tiles, first along the keys, then along the rows."""
    return _join_along("rows", _join_along("keys", found))


def _join_along(axis: Literal["rows", "keys"], found: list[Tile]) -> list[Tile]:
    """Join full tiles that continue one another along `axis` and agree in the other one."""
    other = "keys" if axis == "rows" else "rows"

    def place(tile: Tile) -> tuple[Range, Range]:
        return getattr(tile, other), getattr(tile, axis)

    joined: list[Tile] = []
    for tile in sorted(found, key=place):
        across, (start, stop) = place(tile)
        if joined and joined[-1].band == tile.band == FULL:
            last_across, (first, upto) = place(joined[-1])
            if last_across == across and upto == start:
                joined[-1] = replace(joined[-1], **{axis: (first, stop)})
                continue
        joined.append(tile)
    return joined
