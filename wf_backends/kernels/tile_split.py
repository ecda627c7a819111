"""How a tile is cut where a kernel cannot take its Band whole.

Pure: standard library only. Every cut covers each (row, key) that the band shows exactly once, so
the partial results merge by lse in the forward and add up in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

from wf_backends.schedule import CAUSAL, FULL, Band

BLOCK_ROWS = 192
"""Rows of a masked block. Longer ones compute more scores that the window hides; shorter ones make
torch's CPU kernel fall back to blocks of 32 rows. Measured in docs/kernels.md."""

MOST_KEYS = 2048
"""Keys of a full piece for torch's CPU kernel. Its gradients of keys and values are new memory in
every call: with more keys malloc gives that back, and each call pays for page faults again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive rows and keys of a tile; `band` counts from the piece's own first ones."""

    rows: slice
    keys: slice
    band: Band


Cut = Callable[[int, int, Band], tuple[Piece, ...]]


def whole(rows: int, keys: int, band: Band) -> tuple[Piece, ...]:
    """The tile uncut."""
    return (Piece(slice(0, rows), slice(0, keys), band),)


def effective(rows: int, keys: int, band: Band) -> Band:
    """`band` without the bounds that hide nothing in a tile."""
    left = inf if band.left >= rows - 1 else band.left
    right = inf if band.right >= keys - 1 else band.right
    return Band(left, right)


def cut_causal(rows: int, keys: int, band: Band) -> tuple[Piece, ...]:
    """A trimmed tile for a kernel that knows no window.

    The pieces are full, causal from the top left, causal seen from the last row backwards
    (`is_reversed`), or short blocks of rows of a two-sided window, which need a mask. Tiles bound
    on one side only, as all tiles of causal attention are, need no mask and at most two pieces.
    """
    left_bound = band.left < rows - 1  # the last row does not see the first key
    right_bound = band.right < keys - 1  # the first row does not see the last key
    if left_bound and right_bound:
        return tuple(_two_sided(rows, keys, band))
    if right_bound:
        return tuple(_full_and_rest(rows, keys, slice(0, int(band.right)), CAUSAL))
    if left_bound:
        diagonal = rows - int(band.left)  # keys from here on are seen by every row
        return tuple(_full_and_rest(rows, keys, slice(diagonal, keys), Band(left=band.left)))
    return whole(rows, keys, FULL)


@lru_cache(maxsize=1024)  # asked for every tile
def split_keys(rows: int, keys: int, band: Band, most: int = MOST_KEYS) -> tuple[Piece, ...]:
    """A trimmed tile as pieces that each have all rows, and every key once; see Kernel.split.

    Those of `cut_causal`, the full ones with at most `most` keys; a two-sided window uncut.
    """
    shown = effective(rows, keys, band)
    if shown.left < inf and shown.right < inf:
        return whole(rows, keys, band)
    return tuple(part for piece in cut_causal(rows, keys, band) for part in _shorter(piece, most))


def _shorter(piece: Piece, most: int) -> Iterator[Piece]:
    """A full piece in several that are about as long as one another; any other as it is."""
    start, stop = piece.keys.start, piece.keys.stop
    count = -(-(stop - start) // most) if piece.band == FULL else 1
    edges = [start + (stop - start) * at // count for at in range(count + 1)]
    for first, upto in pairwise(edges):
        yield Piece(piece.rows, slice(first, upto), piece.band)


def is_reversed(band: Band) -> bool:
    """Whether a piece of `cut_causal` is causal once its rows and its keys are read backwards."""
    return band.left != inf and band.right == inf


def cut_window(rows: int, keys: int, band: Band) -> tuple[Piece, ...]:
    """A trimmed tile for a kernel that takes flash-attn's window_size: one to three pieces.

    flash-attn counts a window from the bottom right, so with more rows than keys a window longer
    than the keys can still hide some from the first rows. flash-attn 2 (and torch's copy of it)
    takes such a right window for none (flash_api.cpp, mha_fwd), and puts the number of keys for
    none if there is a left one (set_params_fprop). The rows at fault become a piece of their own.
    """
    left, right = flash_window(band, rows, keys)
    if right >= keys:
        return _split_rows(rows, keys, band, keys - 1 - int(band.right))
    if left >= 0 and right == -1 and rows > keys + 1:
        return _split_rows(rows, keys, band, int(band.left) + 1)
    return whole(rows, keys, band)


def flash_window(band: Band, rows: int, keys: int) -> tuple[int, int]:
    """flash-attn's window_size for a trimmed tile; -1 where the band hides nothing on that side.

    flash-attn aligns a window with the last row and the last key of the tile, a Band with the
    first ones.
    """
    shift = keys - rows
    left, right = band.left + shift, band.right - shift
    return (-1 if left >= keys - 1 else int(left), -1 if right >= rows - 1 else int(right))


def _full_and_rest(rows: int, keys: int, full: slice, band: Band) -> Iterator[Piece]:
    """The keys that all rows see, and those before or after them under `band`."""
    rest = slice(full.stop, keys) if full.start == 0 else slice(0, full.start)
    if full.start < full.stop:
        yield Piece(slice(0, rows), full, FULL)
    yield Piece(slice(0, rows), rest, band)


def _split_rows(rows: int, keys: int, band: Band, at: int) -> tuple[Piece, ...]:
    """The pieces of `cut_window` for the rows before `at` and for those from there on."""
    before = _cut_rows(cut_window, slice(0, at), keys, band)
    return (*before, *_cut_rows(cut_window, slice(at, rows), keys, band))


def _two_sided(rows: int, keys: int, band: Band) -> Iterator[Piece]:
    """The first rows, bound on the right only; the last, on the left only; blocks between them."""
    if rows <= 2 * BLOCK_ROWS:  # more calls would cost more than the hidden scores
        yield from whole(rows, keys, band)
        return
    head = _peel(int(band.left) + 1)
    tail = max(rows - _peel(rows - (keys - 1 - int(band.right))), head)
    yield from _cut_rows(cut_causal, slice(0, head), keys, band)
    for start in range(head, tail, BLOCK_ROWS):
        yield _sub(slice(start, min(start + BLOCK_ROWS, tail)), keys, band)
    yield from _cut_rows(cut_causal, slice(tail, rows), keys, band)


def _peel(rows: int) -> int:
    """How many of `rows` one-sided rows to take out of the blocks: too few are not worth a call."""
    return rows if rows >= BLOCK_ROWS else 0


def _cut_rows(cut: Cut, rows: slice, keys: int, band: Band) -> Iterator[Piece]:
    """The pieces of some rows of a tile, in the tile's own indices."""
    if rows.start == rows.stop:
        return
    part = _sub(rows, keys, band)
    first = part.keys.start
    for piece in cut(rows.stop - rows.start, part.keys.stop - first, part.band):
        yield Piece(_move(piece.rows, rows.start), _move(piece.keys, first), piece.band)


def _sub(rows: slice, keys: int, band: Band) -> Piece:
    """Some rows of a tile, with the keys that they see."""
    first = max(0, rows.start - band.left)
    stop = min(keys, rows.stop + band.right)
    return Piece(rows, slice(int(first), int(stop)), band.shift(int(first) - rows.start))


def _move(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
