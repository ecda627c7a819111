"""Which kernel calls the rows and keys at hand need: positions + mask -> the fewest tiles.

Pure: standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Literal

from wf_backends.schedule import (
    CAUSAL,
    FULL,
    Band,
    Bound,
    Mask,
    Range,
    Ranges,
    globalize,
    intersect,
    join,
    locate,
    span,
    subtract,
)

SHORT_RANGE_ROWS = 2048
"""Rows up to which a range is read together with others of the same tile, at the price of a copy:
kernels compute hidden scores along every diagonal, and one long diagonal has fewer of them than
several short ones. Measured in docs/internals/kernels.md."""


_globalize = lru_cache(maxsize=4096)(globalize)  # asked for in every call

Parts = Mapping[int, Ranges]
"""The number of a part of the mask (a document or a slice) -> the rows or keys that lie in it."""


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
    held: tuple[Ranges, Ranges] = ((), ())
    """The global positions that the two buffers hold."""

    @property
    def positions(self) -> tuple[Ranges, Ranges]:
        """The global positions of its rows and of its keys, in the tile's order."""
        return _globalize(self.rows, self.held[0]), _globalize(self.keys, self.held[1])


def tiles(
    q: Ranges, kv: Ranges, mask: Mask, held: tuple[Ranges, Ranges] | None = None
) -> tuple[Tile, ...]:
    """The tiles of the queries at the positions `q` against the keys at `kv`.

    Every (query, key) pair that the mask allows lies in exactly one tile.

    Args:
        held: what the two buffers hold, if more than `q` and `kv`.
    """
    buffers = held or (q, kv)
    rows, keys = by_part(q, mask, "q"), by_part(kv, mask, "k")
    found = [
        tile
        for part in sorted(rows.keys() & keys.keys())
        for tile in _of_part(rows[part], keys[part], mask.band_of(part), buffers)
    ]
    return tuple(found if mask.slices is None else _join_full(found))


def seen(q: Parts, kv: Parts, mask: Mask) -> tuple[Ranges, Ranges]:
    """The positions in `q` that see some key in `kv`, and those in `kv` that some query sees.

    What the tiles cover, without a tile.
    """
    shared = q.keys() & kv.keys()
    found = [_seen_in_part(q[part], kv[part], mask.band_of(part)) for part in shared]
    if len(found) == 1:
        return found[0]
    rows, keys = (join(piece for sides in found for piece in sides[at]) for at in (0, 1))
    return rows, keys


def _seen_in_part(rows: Ranges, keys: Ranges, band: Band) -> tuple[Ranges, Ranges]:
    if band == FULL:
        return rows, keys
    if band.left == inf:  # all rows from some on, all keys up to some
        right = int(band.right)
        first, stop = keys[0][0] - right, rows[-1][1] + right
        return _clip(rows, (first, rows[-1][1])), _clip(keys, (keys[0][0], stop))
    found = [reach for r in rows for k in keys if (reach := _reach(r, k, band))]
    if not found:
        return (), ()
    return join([seen for seen, _ in found]), join([seen for _, seen in found])


def by_part(ranges: Ranges, mask: Mask, side: Literal["q", "k"]) -> Parts:
    """What of the ranges, of queries or of keys, lies in each part of the mask."""
    if not ranges:
        return {}
    if mask.slices is not None:
        clipped = ((at, _clip(ranges, getattr(one, side))) for at, one in enumerate(mask.slices))
        return {at: inside for at, inside in clipped if inside}
    borders = mask.cu_seqlens
    if borders is None:
        return {0: ranges}
    reached = (
        range(bisect_right(borders, start) - 1, bisect_left(borders, stop))
        for start, stop in ranges
    )
    documents = sorted({at for several in reached for at in several})
    return {at: _clip(ranges, borders[at : at + 2]) for at in documents}


def _clip(ranges: Ranges, edges: Sequence[int]) -> Ranges:
    lo, hi = edges
    if lo <= ranges[0][0] and ranges[-1][1] <= hi:
        return ranges
    first = max(0, bisect_right(ranges, (lo, inf)) - 1)
    clipped: list[Range] = []
    for start, stop in ranges[first:]:
        if start >= hi:
            break
        if stop > lo:
            clipped.append((max(start, lo), min(stop, hi)))
    return tuple(clipped)


def _of_part(rows: Ranges, keys: Ranges, band: Band, held: tuple[Ranges, Ranges]) -> Iterator[Tile]:
    """The tiles of some rows and some keys of one part.

    Rows that are keys as well see each other as a whole does: under a causal mask, one call.
    """
    both = intersect(rows, keys) if band == CAUSAL else ()
    at, met = (locate(both, buffer) for buffer in held)
    short = max(map(span, both), default=0) <= SHORT_RANGE_ROWS
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
        for key_range in keys:
            if reach := _reach(row_range, key_range, band):
                (first, _), (begin, _) = reach
                bounds = band.shift(begin - first)
                num_rows, num_keys = map(span, reach)
                trimmed = Band(_loosen(bounds.left, num_rows), _loosen(bounds.right, num_keys))
                found.append(Tile(locate(reach[:1], q), locate(reach[1:], kv), trimmed))
    return found


def _reach(rows: Range, keys: Range, band: Band) -> tuple[Range, Range] | None:
    """The rows that see one of the keys, and the keys that one of the rows sees."""
    left, right = band.left, band.right
    if rows[0] - left >= keys[1] or keys[0] - right >= rows[1]:
        return None
    first, stop = max(rows[0], keys[0] - right), min(rows[1], keys[1] + left)
    begin, end = max(keys[0], first - left), min(keys[1], stop + right)
    return ((int(first), int(stop)), (int(begin), int(end))) if begin < end else None


def _loosen(bound: Bound, length: int) -> Bound:
    """No limit, where the bound cannot cut anything off."""
    return inf if bound >= length - 1 else bound


def _join_full(found: list[Tile]) -> list[Tile]:
    """Join neighbouring full tiles, first along the keys, then along the rows."""
    single = [tile for tile in found if len(tile.rows) == len(tile.keys) == 1]
    several = [tile for tile in found if not len(tile.rows) == len(tile.keys) == 1]
    return several + _join_along("rows", _join_along("keys", single))


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
