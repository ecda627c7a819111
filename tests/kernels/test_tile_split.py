"""Splits of a tile: together the sub-tiles show what the tile's band shows, and libraries support
each of them. All trimmed tiles of up to 7 x 7 are tried."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from wf_backends.kernels.tile_split import (
    BLOCK_ROWS,
    SubTile,
    flash_window,
    is_reversed,
    split_causal,
    split_window,
)
from wf_backends.schedule.mask import CAUSAL, FULL, Band

Pairs = set[tuple[int, int]]
"""(row, key) pairs that are seen."""


def seen(rows: int, keys: int, band: Band) -> Pairs:
    pairs = product(range(rows), range(keys))
    return {(i, j) for i, j in pairs if -band.left <= j - i <= band.right}


def is_trimmed(rows: int, keys: int, band: Band) -> bool:
    """Whether every row sees a key and every key is seen."""
    pairs = seen(rows, keys, band)
    return {i for i, _ in pairs} == set(range(rows)) and {j for _, j in pairs} == set(range(keys))


def small_tiles() -> list[tuple[int, int, Band]]:
    sizes, bounds = range(1, 8), [*range(-7, 8), inf]
    tiles = ((i, j, Band(a, b)) for i, j, a, b in product(sizes, sizes, bounds, bounds))
    return [tile for tile in tiles if is_trimmed(*tile)]


def size_of(part: SubTile) -> tuple[int, int]:
    """(number of rows, number of keys)."""
    return part.rows.stop - part.rows.start, part.keys.stop - part.keys.start


def seen_in_part(part: SubTile) -> Pairs:
    """The pairs that a sub-tile shows, in the tile's indices."""
    pairs = seen(*size_of(part), part.band)
    return {(i + part.rows.start, j + part.keys.start) for i, j in pairs}


def check_split(parts: tuple[SubTile, ...], rows: int, keys: int, band: Band) -> None:
    """Check that each visible pair is in one sub-tile, each row of a sub-tile sees a key, and
    either all rows of a sub-tile or none of them have been in an earlier one."""
    covered = [pair for part in parts for pair in seen_in_part(part)]
    assert len(covered) == len(set(covered))
    assert set(covered) == seen(rows, keys, band)
    rows_started = 0
    for part in parts:
        assert {i for i, _ in seen_in_part(part)} == set(range(part.rows.start, part.rows.stop))
        assert part.rows.start == rows_started or part.rows.stop <= rows_started
        rows_started = max(rows_started, part.rows.stop)


def from_bottom_right(rows: int, keys: int, left: float, right: float) -> Pairs:
    """The pairs of a window that is counted from the bottom right corner, as in flash-attn."""
    return seen(rows, keys, Band(left - (keys - rows), right + (keys - rows)))


def seen_by_flash_2(rows: int, keys: int, window: tuple[int, int]) -> Pairs:
    """What flash-attn 2 shows: mha_fwd drops bounds that are not smaller than the number of keys,
    and set_params_fprop sets one missing bound to the number of keys."""
    left, right = (-1 if bound >= keys else bound for bound in window)
    if left < 0 and right < 0:
        return seen(rows, keys, FULL)
    left, right = (keys if bound < 0 else bound for bound in (left, right))
    return from_bottom_right(rows, keys, left, right)


def seen_by_flash_3(rows: int, keys: int, window: tuple[int, int]) -> Pairs:
    """What flash-attn 3 shows: it compares left bounds with keys, right bounds with rows."""
    left = inf if window[0] < 0 or window[0] >= keys - 1 else window[0]
    right = inf if window[1] < 0 or window[1] >= rows - 1 else window[1]
    return from_bottom_right(rows, keys, left, right)


def test_split_causal_shows_every_small_tile_exactly():
    for tile in small_tiles():
        check_split(split_causal(*tile), *tile)


@pytest.mark.parametrize("rows, keys", [(450, 450), (250, 600), (600, 250)])
@pytest.mark.parametrize("left, right", [(10, 0), (100, 0), (64, 64), (3, 200), (250, 20), (0, 0)])
def test_split_causal_shows_long_windows_exactly(rows: int, keys: int, left: int, right: int):
    band = Band(left + max(rows - keys, 0), right + max(keys - rows, 0))
    assert is_trimmed(rows, keys, band)
    check_split(split_causal(rows, keys, band), rows, keys, band)


def test_one_sided_tiles_have_two_causal_or_full_parts_at_most():
    for rows, keys, band in small_tiles():
        if band.left >= rows - 1 or band.right >= keys - 1:
            parts = split_causal(rows, keys, band)
            assert len(parts) <= 2
            assert all(p.band in (FULL, CAUSAL) or is_reversed(p.band) for p in parts)


def test_a_reversed_part_is_causal_if_rows_and_keys_are_counted_backwards():
    reversed_parts = [
        part for tile in small_tiles() for part in split_causal(*tile) if is_reversed(part.band)
    ]
    assert reversed_parts
    for part in reversed_parts:
        rows, keys = size_of(part)
        backwards = {(rows - 1 - i, keys - 1 - j) for i, j in seen(rows, keys, part.band)}
        assert backwards == seen(rows, keys, CAUSAL)


@pytest.mark.parametrize("width", (100, 2000))
def test_masked_parts_are_one_block_long_at_most(width):
    masked_parts = [
        part
        for part in split_causal(8192, 8192, Band(width, 0))
        if part.band not in (FULL, CAUSAL) and not is_reversed(part.band)
    ]
    assert masked_parts
    for part in masked_parts:
        rows, keys = size_of(part)
        assert rows <= BLOCK_ROWS
        assert keys <= BLOCK_ROWS + width


def test_flash_3_shows_every_small_tile_exactly():
    for rows, keys, band in small_tiles():
        left, right = flash_window(band, rows, keys)
        assert left >= -1 and right >= -1
        assert seen_by_flash_3(rows, keys, (left, right)) == seen(rows, keys, band)


def test_flash_2_shows_every_part_of_every_small_tile_exactly():
    for tile in small_tiles():
        parts = split_window(*tile)
        assert len(parts) <= 3
        check_split(parts, *tile)
        for part in parts:
            window = flash_window(part.band, *size_of(part))
            assert seen_by_flash_2(*size_of(part), window) == seen(*size_of(part), part.band)


@pytest.mark.parametrize("band", (CAUSAL, Band(left=6)), ids=("causal", "left bound"))
def test_flash_2_shows_a_tile_with_more_rows_than_keys_wrongly_as_a_whole(band):
    assert seen_by_flash_2(8, 2, flash_window(band, 8, 2)) != seen(8, 2, band)


def test_a_causal_tile_with_more_rows_than_keys_has_two_parts_for_flash_2():
    assert split_window(8, 2, CAUSAL) == (
        SubTile(slice(0, 1), slice(0, 1), CAUSAL),
        SubTile(slice(1, 8), slice(0, 2), Band(right=1)),
    )


def test_tiles_of_equal_rows_and_keys_are_one_part_for_flash_2():
    squares = [(rows, keys, band) for rows, keys, band in small_tiles() if rows == keys]
    assert squares
    assert all(len(split_window(*tile)) == 1 for tile in squares)
