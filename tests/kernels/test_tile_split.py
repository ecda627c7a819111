"""Cutting a tile: every cut shows exactly what the band shows, in pieces that kernels can take."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from wf_backends.kernels.tile_split import (
    BLOCK_ROWS,
    Piece,
    cut_causal,
    cut_window,
    effective,
    flash_window,
    is_reversed,
    split_keys,
)
from wf_backends.schedule.mask import CAUSAL, FULL, Band

Seen = set[tuple[int, int]]


def seen(rows: int, keys: int, band: Band) -> Seen:
    return {(i, j) for i, j in product(range(rows), range(keys)) if band.sees(i, j)}


def is_trimmed(rows: int, keys: int, band: Band) -> bool:
    pairs = seen(rows, keys, band)
    return {i for i, _ in pairs} == set(range(rows)) and {j for _, j in pairs} == set(range(keys))


def small_tiles() -> list[tuple[int, int, Band]]:
    sizes, bounds = range(1, 8), [*range(-7, 8), inf]
    tiles = ((i, j, Band(a, b)) for i, j, a, b in product(sizes, sizes, bounds, bounds))
    return [tile for tile in tiles if is_trimmed(*tile)]


def seen_by_piece(piece: Piece) -> Seen:
    r, c = piece.rows, piece.keys
    pairs = seen(r.stop - r.start, c.stop - c.start, piece.band)
    return {(i + r.start, j + c.start) for i, j in pairs}


def check_cut(pieces: tuple[Piece, ...], rows: int, keys: int, band: Band) -> None:
    """Each pair in exactly one piece, and no piece with a row that sees nothing."""
    covered = [pair for piece in pieces for pair in seen_by_piece(piece)]
    assert len(covered) == len(set(covered))
    assert set(covered) == seen(rows, keys, band)
    for piece in pieces:
        assert {i for i, _ in seen_by_piece(piece)} == set(range(piece.rows.start, piece.rows.stop))


def test_pieces_to_hand_over_have_all_rows_and_every_key_once():
    for rows, keys, band in small_tiles():
        pieces = split_keys(rows, keys, band, most=2)
        check_cut(pieces, rows, keys, band)
        assert all(piece.rows == slice(0, rows) for piece in pieces)
        held = sorted(key for piece in pieces for key in range(keys)[piece.keys])
        assert held == list(range(keys))
        one_sided = inf in (effective(rows, keys, band).left, effective(rows, keys, band).right)
        for piece in pieces:
            part = rows, piece.keys.stop - piece.keys.start, piece.band
            assert part[1] <= 2 or piece.band != FULL
            if one_sided:  # the kernel takes it as it is
                assert len(cut_causal(*part)) == 1


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
        check_cut(cut_causal(*tile), *tile)


@pytest.mark.parametrize("rows, keys", [(450, 450), (250, 600), (600, 250)])
@pytest.mark.parametrize("left, right", [(10, 0), (100, 0), (64, 64), (3, 200), (250, 20), (0, 0)])
def test_long_windows_are_cut_exactly_into_blocks(rows: int, keys: int, left: int, right: int):
    band = Band(left + max(rows - keys, 0), right + max(keys - rows, 0))
    assert is_trimmed(rows, keys, band)
    check_cut(cut_causal(rows, keys, band), rows, keys, band)


def test_one_sided_tiles_need_no_mask_and_at_most_two_pieces():
    for rows, keys, band in small_tiles():
        if band.left < rows - 1 and band.right < keys - 1:
            continue
        pieces = cut_causal(rows, keys, band)
        assert len(pieces) <= 2
        assert all(p.band in (FULL, CAUSAL) or is_reversed(p.band) for p in pieces)


def test_a_reversed_piece_is_causal_when_read_backwards():
    for tile in small_tiles():
        for piece in filter(lambda p: is_reversed(p.band), cut_causal(*tile)):
            rows, keys = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
            backwards = {(rows - 1 - i, keys - 1 - j) for i, j in seen(rows, keys, piece.band)}
            assert backwards == seen(rows, keys, CAUSAL)


def test_no_masked_piece_is_longer_than_a_block():
    for width in (100, 2000):
        band = Band(width, 0)
        masked = [
            p
            for p in cut_causal(8192, 8192, band)
            if p.band not in (FULL, CAUSAL) and not is_reversed(p.band)
        ]
        assert masked
        for piece in masked:
            assert piece.rows.stop - piece.rows.start <= BLOCK_ROWS
            assert piece.keys.stop - piece.keys.start <= BLOCK_ROWS + width


def test_flash_window_says_the_band_of_every_small_tile():
    for rows, keys, band in small_tiles():
        left, right = flash_window(band, rows, keys)
        assert left >= -1 and right >= -1
        assert flash_3_sees(rows, keys, (left, right)) == seen(rows, keys, band)


def test_flash_2_shows_every_piece_of_every_small_tile_exactly():
    for tile in small_tiles():
        pieces = cut_window(*tile)
        assert len(pieces) <= 3
        check_cut(pieces, *tile)
        for piece in pieces:
            rows, keys = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
            window = flash_window(piece.band, rows, keys)
            assert flash_2_sees(rows, keys, window) == seen(rows, keys, piece.band)


def test_more_rows_than_keys_show_why_flash_2_needs_pieces():
    window = flash_window(CAUSAL, 8, 2)
    assert flash_2_sees(8, 2, window) != seen(8, 2, CAUSAL)
    assert cut_window(8, 2, CAUSAL) == (
        Piece(slice(0, 1), slice(0, 1), CAUSAL),
        Piece(slice(1, 8), slice(0, 2), Band(right=1)),
    )
    left_only = Band(left=6)
    assert flash_2_sees(8, 2, flash_window(left_only, 8, 2)) != seen(8, 2, left_only)


def test_tiles_of_equal_rows_and_keys_are_never_cut_for_flash():
    squares = [tile for tile in small_tiles() if tile[0] == tile[1]]
    assert squares
    assert all(len(cut_window(*tile)) == 1 for tile in squares)
