"""How a tile is split for torch's flash kernel for CPUs, which knows full, causal and masks.

Pure: standard library only. What it is split by was measured: docs/internals/kernels.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf

from wf_backends.kernels.tile_split import SubTile, effective, split_rows, sub_tile, whole
from wf_backends.schedule import CAUSAL, FULL, Band

BLOCK_ROWS = 192
"""Rows of a masked block. Longer ones compute more scores that the window hides; shorter ones make
torch's CPU kernel fall back to blocks of 32 rows. Measured in docs/internals/kernels.md."""

UNSKIPPED_ROWS = 512
"""Rows of a causal square up to which torch's CPU kernel computes every score, also those above
the diagonal: it skips blocks of 512 keys."""


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
        return (*_full(rows, 0, int(right)), *_causal(rows, slice(int(right), keys)))
    if left < inf:  # all rows see the keys from the diagonal of the last row on
        diagonal = rows - int(left)
        rest = SubTile(slice(0, rows), slice(0, diagonal), Band(left=left))
        return (*_full(rows, diagonal, keys), rest)
    return whole(rows, keys, FULL)


def _full(rows: int, start: int, stop: int) -> Iterator[SubTile]:
    if start < stop:
        yield SubTile(slice(0, rows), slice(start, stop), FULL)


def _causal(rows: int, keys: slice) -> Iterator[SubTile]:
    """Causal from the first of `keys` on; a short square as two on the diagonal and a full one."""
    if not UNSKIPPED_ROWS // 2 < rows == keys.stop - keys.start <= UNSKIPPED_ROWS:
        yield SubTile(slice(0, rows), keys, CAUSAL)
        return
    half, middle = rows // 2, keys.start + rows // 2
    first, last = slice(0, half), slice(half, rows)
    earlier, later = slice(keys.start, middle), slice(middle, keys.stop)
    yield SubTile(first, earlier, CAUSAL)
    yield SubTile(last, earlier, FULL)
    yield SubTile(last, later, CAUSAL)


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
