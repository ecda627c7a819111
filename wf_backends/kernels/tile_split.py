"""Splits a tile into sub-tiles where a library does not support its Band.

Pure: standard library only. The sub-tiles cover each visible (row, key) exactly once, so partial
results are merged by lse in the forward and added in the backward. Sub-tiles are in the order of
their rows: either all rows of a sub-tile or none of them have been in an earlier one.

flash-attn's kernels support windows (`split_window`). torch's flash kernel for CPUs supports full,
causal and masked tiles (`split_causal`); measurements: docs/internals/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from wf_backends.schedule import CAUSAL, FULL, Band

BLOCK_ROWS = 192
"""Rows of a masked block. A longer block computes more scores that the window hides; with a shorter
one torch's CPU kernel uses blocks of 32 rows. Measured in docs/internals/kernels.md."""


class SubTile(NamedTuple):
    """Consecutive rows and keys of a tile; `band` is in the sub-tile's own indices."""

    rows: slice
    keys: slice
    band: Band


Split = Callable[[int, int, Band], tuple[SubTile, ...]]
"""(rows, keys, band) -> sub-tiles, for trimmed tiles: every row sees a key, every key is seen."""


def unsplit(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """The tile as its only sub-tile."""
    return (SubTile(slice(0, rows), slice(0, keys), band),)


@lru_cache(maxsize=1024)  # called for every tile
def row_blocks(rows: int, keys: int, band: Band, max_rows: int) -> tuple[SubTile, ...]:
    """A trimmed tile as blocks of at most `max_rows` rows, each with the keys that its rows see."""
    if rows <= max_rows:
        return unsplit(rows, keys, band)
    blocks = (slice(start, min(start + max_rows, rows)) for start in range(0, rows, max_rows))
    return tuple(sub_tile(block, keys, band) for block in blocks)


@lru_cache(maxsize=1024)  # called for every tile
def split_window(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """A trimmed tile as one to three sub-tiles that flash-attn's window_size can express.

    flash-attn counts a window from the bottom right, so with more rows than keys a window longer
    than the keys can still hide keys from the first rows. flash-attn 2 (and torch's copy of it)
    treats a right window of that length as unlimited (flash_api.cpp, mha_fwd), and sets an
    unlimited one to the number of keys if there is a left window (set_params_fprop). The rows for
    which that is wrong get a sub-tile of their own.
    """
    left, right = flash_window(band, rows, keys)
    if right >= keys:
        border = keys - 1 - int(band.right)
    elif left >= 0 and right == -1 and rows > keys + 1:
        border = int(band.left) + 1
    else:
        return unsplit(rows, keys, band)
    first_rows = split_rows(split_window, slice(0, border), keys, band)
    last_rows = split_rows(split_window, slice(border, rows), keys, band)
    return (*first_rows, *last_rows)


def flash_window(band: Band, rows: int, keys: int) -> tuple[int, int]:
    """flash-attn's window_size (left, right) for a trimmed tile; -1 = no key hidden on that side.

    flash-attn aligns a window with the last row and the last key of the tile, a Band with the
    first ones.
    """
    shift = keys - rows
    left, right = band.left + shift, band.right - shift
    return (-1 if left >= keys - 1 else int(left), -1 if right >= rows - 1 else int(right))


def split_rows(split: Split, rows: slice, keys: int, band: Band) -> Iterator[SubTile]:
    """Some rows of a tile, split by `split`; the sub-tiles are in the tile's own indices."""
    if rows.start == rows.stop:
        return
    part = sub_tile(rows, keys, band)
    first_row, first_key = rows.start, part.keys.start
    for inner in split(rows.stop - first_row, part.keys.stop - first_key, part.band):
        yield SubTile(_shift(inner.rows, first_row), _shift(inner.keys, first_key), inner.band)


def sub_tile(rows: slice, keys: int, band: Band) -> SubTile:
    """Some rows of a tile, with the keys that they see."""
    first = int(max(0, rows.start - band.left))
    stop = int(min(keys, rows.stop + band.right))
    return SubTile(rows, slice(first, stop), band.shift(first - rows.start))


def _shift(rows: slice, offset: int) -> slice:
    return slice(rows.start + offset, rows.stop + offset)


@lru_cache(maxsize=1024)  # called for every tile
def split_causal(rows: int, keys: int, band: Band) -> tuple[SubTile, ...]:
    """A trimmed tile for torch's CPU kernel, which does not support windows.

    A sub-tile is full, causal from the top left, causal once its rows and keys are reversed
    (`is_reversed`), or a short block of rows of a two-sided window, which needs a mask. Tiles
    with a bound on one side only need no mask; all tiles of causal attention are such tiles.
    """
    effective = band.within(rows, keys)
    left, right = effective.left, effective.right
    if left < inf and right < inf:
        return tuple(_split_two_sided(rows, keys, band))
    if right < inf:  # all rows see the first keys
        full_keys, other_keys, other_band = slice(0, int(right)), slice(int(right), keys), CAUSAL
    elif left < inf:  # all rows see the last keys, from the last row's diagonal on
        diagonal = rows - int(left)
        full_keys, other_keys, other_band = slice(diagonal, keys), slice(0, diagonal), Band(left)
    else:
        return unsplit(rows, keys, FULL)
    other = SubTile(slice(0, rows), other_keys, other_band)
    if full_keys.start >= full_keys.stop:
        return (other,)
    return SubTile(slice(0, rows), full_keys, FULL), other


def is_reversed(band: Band) -> bool:
    """Whether a sub-tile of `split_causal` is causal once its rows and keys are reversed."""
    return band.left != inf and band.right == inf


def _split_two_sided(rows: int, keys: int, band: Band) -> Iterator[SubTile]:
    """First the rows with a bound on the right only, then blocks of rows with two bounds, then the
    rows with a bound on the left only."""
    if rows <= 2 * BLOCK_ROWS:  # more calls would cost more than the hidden scores
        yield from unsplit(rows, keys, band)
        return
    blocks_start = _zero_if_short(int(band.left) + 1)
    last_rows = _zero_if_short(rows - (keys - 1 - int(band.right)))
    blocks_stop = max(rows - last_rows, blocks_start)
    yield from split_rows(split_causal, slice(0, blocks_start), keys, band)
    for start in range(blocks_start, blocks_stop, BLOCK_ROWS):
        yield sub_tile(slice(start, min(start + BLOCK_ROWS, blocks_stop)), keys, band)
    yield from split_rows(split_causal, slice(blocks_stop, rows), keys, band)


def _zero_if_short(rows: int) -> int:
    """`rows`, or 0 if they are too few for a call of their own."""
    return rows if rows >= BLOCK_ROWS else 0
