"""Every split of a tile shows exactly what its band shows, in parts that kernels can take."""

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

Seen = set[tuple[int, int]]


def seen(rows: int, keys: int, band: Band) -> Seen:
    return {
        (i, j) for i, j in product(range(rows), range(keys)) if (-band.left <= j - i <= band.right)
    }


def is_trimmed(rows: int, keys: int, band: Band) -> bool:
    pairs = seen(rows, keys, band)
    return {i for i, _ in pairs} == set(range(rows)) and {j for _, j in pairs} == set(range(keys))


def small_tiles() -> list[tuple[int, int, Band]]:
    sizes, bounds = range(1, 8), [*range(-7, 8), inf]
    tiles = ((i, j, Band(a, b)) for i, j, a, b in product(sizes, sizes, bounds, bounds))
    return [tile for tile in tiles if is_trimmed(*tile)]


def seen_by_part(part: SubTile) -> Seen:
    r, c = part.rows, part.keys
    pairs = seen(r.stop - r.start, c.stop - c.start, part.band)
    return {(i + r.start, j + c.start) for i, j in pairs}


def check_split(parts: tuple[SubTile, ...], rows: int, keys: int, band: Band) -> None:
    """Each pair in exactly one part, no part with a row that sees nothing, rows in order."""
    covered = [pair for part in parts for pair in seen_by_part(part)]
    assert len(covered) == len(set(covered))
    assert set(covered) == seen(rows, keys, band)
    for part in parts:
        assert {i for i, _ in seen_by_part(part)} == set(range(part.rows.start, part.rows.stop))
    begun = 0  # a part has rows that all have appeared before, or none that has
    for part in parts:
        assert part.rows.start == begun or part.rows.stop <= begun
        begun = max(begun, part.rows.stop)


def flash_2_sees(rows: int, keys: int, window: tuple[int, int]) -> Seen:
    """What flash-attn 2 shows: mha_fwd forgets long windows, set_params_fprop fills one side in."""
    left, right = (-1 if w >= keys else w for w in window)
    if left < 0 and right < 0:
        return set(product(range(rows), range(keys)))
    left, right = (keys if w < 0 else w for w in (left, right))
    shift = keys - rows
    pairs = product(range(rows), range(keys))
    return {(i, j) for i, j in pairs if i + shift - left <= j <= i + shift + right}


def flash_3_sees(rows: int, keys: int, window: tuple[int, int]) -> Seen:
    """What flash-attn 3 shows; its rule looks at the keys on the left and the rows on the right."""
    left = inf if window[0] < 0 or window[0] >= keys - 1 else window[0]
    right = inf if window[1] < 0 or window[1] >= rows - 1 else window[1]
    shift = keys - rows
    pairs = product(range(rows), range(keys))
    return {(i, j) for i, j in pairs if i + shift - left <= j <= i + shift + right}


def test_every_small_tile_is_cut_exactly_for_a_causal_kernel():
    for tile in small_tiles():
        check_split(split_causal(*tile), *tile)


@pytest.mark.parametrize("rows, keys", [(450, 450), (250, 600), (600, 250)])
@pytest.mark.parametrize("left, right", [(10, 0), (100, 0), (64, 64), (3, 200), (250, 20), (0, 0)])
def test_long_windows_are_cut_exactly_into_blocks(rows: int, keys: int, left: int, right: int):
    band = Band(left + max(rows - keys, 0), right + max(keys - rows, 0))
    assert is_trimmed(rows, keys, band)
    check_split(split_causal(rows, keys, band), rows, keys, band)


def test_one_sided_tiles_need_no_mask_and_at_most_two_parts():
    for rows, keys, band in small_tiles():
        if band.left < rows - 1 and band.right < keys - 1:
            continue
        parts = split_causal(rows, keys, band)
        assert len(parts) <= 2
        assert all(p.band in (FULL, CAUSAL) or is_reversed(p.band) for p in parts)


def test_a_reversed_part_is_causal_when_read_backwards():
    for tile in small_tiles():
        for part in filter(lambda p: is_reversed(p.band), split_causal(*tile)):
            rows, keys = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
            backwards = {(rows - 1 - i, keys - 1 - j) for i, j in seen(rows, keys, part.band)}
            assert backwards == seen(rows, keys, CAUSAL)


def test_no_masked_part_is_longer_than_a_block():
    for width in (100, 2000):
        band = Band(width, 0)
        masked = [
            p
            for p in split_causal(8192, 8192, band)
            if p.band not in (FULL, CAUSAL) and not is_reversed(p.band)
        ]
        assert masked
        for part in masked:
            assert part.rows.stop - part.rows.start <= BLOCK_ROWS
            assert part.keys.stop - part.keys.start <= BLOCK_ROWS + width


def test_flash_window_says_the_band_of_every_small_tile():
    for rows, keys, band in small_tiles():
        left, right = flash_window(band, rows, keys)
        assert left >= -1 and right >= -1
        assert flash_3_sees(rows, keys, (left, right)) == seen(rows, keys, band)


def test_flash_2_shows_every_part_of_every_small_tile_exactly():
    for tile in small_tiles():
        parts = split_window(*tile)
        assert len(parts) <= 3
        check_split(parts, *tile)
        for part in parts:
            rows, keys = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
            window = flash_window(part.band, rows, keys)
            assert flash_2_sees(rows, keys, window) == seen(rows, keys, part.band)


def test_more_rows_than_keys_show_why_flash_2_needs_parts():
    window = flash_window(CAUSAL, 8, 2)
    assert flash_2_sees(8, 2, window) != seen(8, 2, CAUSAL)
    assert split_window(8, 2, CAUSAL) == (
        SubTile(slice(0, 1), slice(0, 1), CAUSAL),
        SubTile(slice(1, 8), slice(0, 2), Band(right=1)),
    )
    left_only = Band(left=6)
    assert flash_2_sees(8, 2, flash_window(left_only, 8, 2)) != seen(8, 2, left_only)


def test_tiles_of_equal_rows_and_keys_are_never_cut_for_flash():
    squares = [tile for tile in small_tiles() if tile[0] == tile[1]]
    assert squares
    assert all(len(split_window(*tile)) == 1 for tile in squares)
