"""How a tile is split where a library cannot take its Band whole.

Pure: standard library only. Every split covers each (row, key) that the band shows exactly once,
so the partial results merge by lse in the forward and add up in the backward. Sub-tiles come in
the order of their rows: all rows of one have appeared in earlier ones, or none has.

flash-attn's kernels know windows (`split_window`). torch's flash kernel for CPUs knows full, causal
and masks (`split_causal`); what it is split by was measured: docs/internals/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from wf_backends.schedule import CAUSAL, FULL, Band

BLOCK_ROWS = 192
"""Rows of a masked block. Longer ones compute more scores that the window hides; shorter ones make
torch's CPU kernel fall back to blocks of 32 rows. Measured in docs/internals/kernels.md."""


class SubTile(NamedTuple):
    """Some consecutive rows and keys of a tile; `band` counts from its own first ones."""

    rows: slice
    keys: slice
    band: Band


Split = Callable[[int, int, Band], tuple[SubTile, ...]]


def whole(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """The tile as it is."""
    return (SubTile(slice(0, rows), slice(0, keys), band),)


@lru_cache(maxsize=1024)  # asked for every tile
def row_blocks(rows: int, keys: int, band: Band, most: int) -> tuple[SubTile, ...]:
    """A trimmed tile as blocks of at most so many rows, each with the keys that they see."""
    if rows <= most:
        return whole(rows, keys, band)
    starts = range(0, rows, most)
    return tuple(sub_tile(slice(at, min(at + most, rows)), keys, band) for at in starts)


def effective(rows: int, keys: int, band: Band) -> Band:
    """`band` without the bounds that hide nothing in a tile."""
    left = inf if band.left >= rows - 1 else band.left
    right = inf if band.right >= keys - 1 else band.right
    return Band(left, right)


@lru_cache(maxsize=1024)  # asked for every tile
def split_window(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """A trimmed tile as one to three that flash-attn's window_size can say.

    flash-attn counts a window from the bottom right, so with more rows than keys a window longer
    than the keys can still hide some from the first rows. flash-attn 2 (and torch's copy of it)
    takes such a right window for none (flash_api.cpp, mha_fwd), and puts the number of keys for
    none if there is a left one (set_params_fprop). The rows at fault become a sub-tile of their
    own.
    """
    left, right = flash_window(band, rows, keys)
    if right >= keys:
        at = keys - 1 - int(band.right)
    elif left >= 0 and right == -1 and rows > keys + 1:
        at = int(band.left) + 1
    else:
        return whole(rows, keys, band)
    before = split_rows(split_window, slice(0, at), keys, band)
    return (*before, *split_rows(split_window, slice(at, rows), keys, band))


def flash_window(band: Band, rows: int, keys: int) -> tuple[int, int]:
    """flash-attn's window_size for a trimmed tile; -1 where the band hides nothing on that side.

    flash-attn aligns a window with the last row and the last key of the tile, a Band with the
    first ones.
    """
    shift = keys - rows
    left, right = band.left + shift, band.right - shift
    return (-1 if left >= keys - 1 else int(left), -1 if right >= rows - 1 else int(right))


def split_rows(split: Split, rows: slice, keys: int, band: Band) -> Iterator[SubTile]:
    """The sub-tiles of some rows of a tile, in the tile's own indices."""
    if rows.start == rows.stop:
        return
    part = sub_tile(rows, keys, band)
    first = part.keys.start
    for one in split(rows.stop - rows.start, part.keys.stop - first, part.band):
        yield SubTile(_move(one.rows, rows.start), _move(one.keys, first), one.band)


def sub_tile(rows: slice, keys: int, band: Band) -> SubTile:
    """Some rows of a tile, with the keys that they see."""
    first = max(0, rows.start - band.left)
    stop = min(keys, rows.stop + band.right)
    return SubTile(rows, slice(int(first), int(stop)), band.shift(int(first) - rows.start))


def _move(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


@lru_cache(maxsize=1024)  # asked for every tile
def split_causal(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """A trimmed tile for torch's CPU kernel, which knows no window.

    The sub-tiles are full, causal from the top left, causal seen from the last row backwards
    (`is_reversed`), or short blocks of rows of a two-sided window, which need a mask. Tiles bound
    on one side only, as all tiles of causal attention are, need no mask.
    """
    shown = effective(rows, keys, band)
    left, right = shown.left, shown.right
    if left < inf and right < inf:
        return tuple(_two_sided(rows, keys, band))
    if right < inf:  # all rows see the first keys
        full, rest, bound = slice(0, int(right)), slice(int(right), keys), CAUSAL
    elif left < inf:  # all rows see the keys from the diagonal of the last row on
        diagonal = rows - int(left)
        full, rest, bound = slice(diagonal, keys), slice(0, diagonal), Band(left=left)
    else:
        return whole(rows, keys, FULL)
    parts = SubTile(slice(0, rows), full, FULL), SubTile(slice(0, rows), rest, bound)
    return parts if full.start < full.stop else parts[1:]


def is_reversed(band: Band) -> bool:
    """Whether a sub-tile of `split_causal` is causal once rows and keys are read backwards."""
    return band.left != inf and band.right == inf


def _two_sided(rows: int, keys: int, band: Band) -> Iterator[SubTile]:
    """The first rows, bound on the right only; the last, on the left only; blocks between them."""
    if rows <= 2 * BLOCK_ROWS:  # more calls would cost more than the hidden scores
        yield from whole(rows, keys, band)
        return
    head = _worth_a_call(int(band.left) + 1)
    tail = max(rows - _worth_a_call(rows - (keys - 1 - int(band.right))), head)
    yield from split_rows(split_causal, slice(0, head), keys, band)
    for start in range(head, tail, BLOCK_ROWS):
        yield sub_tile(slice(start, min(start + BLOCK_ROWS, tail)), keys, band)
    yield from split_rows(split_causal, slice(tail, rows), keys, band)


def _worth_a_call(rows: int) -> int:
    """`rows` that are bound on one side only, or 0 if they are too few for a call of their own."""
    return rows if rows >= BLOCK_ROWS else 0
