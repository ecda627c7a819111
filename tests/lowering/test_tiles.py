"""Tiles: their union is the mask, none is larger than it must be, and few calls are made."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import visible
from tests.slices import block_causal, drawn_slices
from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.tiles import SHORT_RANGE_ROWS, Tile, by_part, seen, tiles
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.ranges import join, size
from wf_backends.schedule.routes import concentric, ring

LENGTH = 24
sets = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=4).map(join)
bounds = st.sampled_from((inf, 0, 1, 3, 9))
borders = st.sets(st.integers(1, LENGTH - 1), max_size=5).map(
    lambda cuts: (0, *sorted(cuts), LENGTH)
)
in_slices = drawn_slices(LENGTH).map(lambda told: make_mask(**told))
masks = st.builds(Mask, st.builds(Band, bounds, bounds), st.none() | borders) | in_slices


def positions(ranges):
    return [p for start, stop in ranges for p in range(start, stop)]


@settings(max_examples=400)
@given(sets, sets, masks, st.booleans())
def test_every_visible_pair_lies_in_exactly_one_trimmed_tile(q, kv, mask, same):
    kv = q if same else kv
    rows, keys = positions(q), positions(kv)
    allowed = visible(mask, LENGTH, LENGTH)
    want = [(i, j) for i, p in enumerate(rows) for j, k in enumerate(keys) if allowed[p, k]]
    found = tiles(q, kv, mask)
    got = []
    for tile in found:
        pairs = [
            (i, j)
            for row, i in enumerate(positions(tile.rows))
            for key, j in enumerate(positions(tile.keys))
            if (-tile.band.left <= key - row <= tile.band.right)
        ]
        assert {i for i, _ in pairs} == set(positions(tile.rows)), "a row that sees nothing"
        assert {j for _, j in pairs} == set(positions(tile.keys)), "a key that nobody sees"
        assert len(pairs) == tile_area(tile)
        got += pairs
    assert sorted(got) == want
    seen_rows, seen_keys = seen(by_part(q, mask, "q"), by_part(kv, mask, "k"), mask)
    assert positions(seen_rows) == sorted({rows[i] for i, _ in want})
    assert positions(seen_keys) == sorted({keys[j] for _, j in want})


@given(sets, sets, masks)
def test_every_tile_is_a_legal_flash_attention_window(q, kv, mask):
    """flash-attn aligns windows at the bottom right and takes no negative ones."""
    for tile in tiles(q, kv, mask):
        more_keys = size(tile.keys) - size(tile.rows)
        assert tile.band.left + more_keys >= 0
        assert tile.band.right - more_keys >= 0


def calls(schedule, layout, mask):
    n = schedule.num_ranks
    plans = [lower(Problem(schedule, layout, layout, mask), rank) for rank in range(n)]
    return [sum(len(step.tiles) for step in plan.steps) for plan in plans]


def test_neighbouring_full_tiles_join():
    """What a concentric team of 4 on 16 zigzag ranks holds would be one kernel call."""
    layout, schedule = zigzag(16, 64), concentric(16, 4)
    for rank in range(16):
        held = (schedule.q[rank], schedule.kv[rank])
        rows, keys = (join(piece for s in shards for piece in layout[s]) for shards in held)
        assert len(tiles(rows, keys, Mask(CAUSAL))) == 1
    assert calls(ring(8), zigzag(8, 64), Mask(CAUSAL)) == [8] * 8
    assert calls(ring(8), contiguous(8, 64), Mask(CAUSAL)) == list(range(1, 9))


def test_a_shard_on_itself_is_one_causal_call():
    shard = zigzag(4, 64)[1]
    (tile,) = tiles(shard, shard, Mask(CAUSAL))
    assert tile.band == CAUSAL and tile.rows == tile.keys == ((0, 16),)


def test_rows_that_are_keys_as_well_are_one_causal_call():
    """A shard beside another's: one diagonal, and what the later of them sees of the other."""
    own, both = ((0, 4), (12, 16)), ((0, 8), (8, 16))
    diagonal, rest = tiles(((0, 4), (12, 16)), join(both), Mask(CAUSAL))
    assert diagonal == Tile(((0, 8),), own, CAUSAL)
    assert rest == Tile(((4, 8),), ((4, 12),), FULL)


def test_long_ranges_are_not_copied_for_one_call():
    """Their own diagonals hide few scores beside those that they show."""
    rows = ((0, SHORT_RANGE_ROWS + 1), (3 * SHORT_RANGE_ROWS, 4 * SHORT_RANGE_ROWS))
    found = tiles(rows, ((0, 4 * SHORT_RANGE_ROWS),), Mask(CAUSAL))
    assert all(len(tile.rows) == len(tile.keys) == 1 for tile in found)


def test_full_slices_that_lie_side_by_side_are_one_call():
    mask = make_mask(**block_causal(4, LENGTH))
    assert len(tiles(((16, 24),), ((0, 16),), mask)) == 1
    assert len(tiles(((16, 24),), ((0, 24),), mask)) == 2


def test_bounds_that_cut_nothing_off_are_dropped():
    (tile,) = tiles(((8, 12),), ((2, 5),), Mask(Band(left=10, right=0)))
    assert tile.band == FULL


def test_public_words_become_a_mask():
    assert make_mask() == Mask(FULL)
    assert make_mask(causal=True) == Mask(CAUSAL)
    assert make_mask(causal=True, window_size=(4, 4)) == Mask(Band(4, 0))
    assert make_mask(window_size=(-1, 3)) == Mask(Band(inf, 3))
    assert make_mask(cu_seqlens=[0, 3, 8], seqlen=8).documents(8) == ((0, 3), (3, 8))


@pytest.mark.parametrize(
    ("words", "says"),
    (
        ({"window_size": (-2, 0)}, r"window_size must be \(left, right\).*got \(-2, 0\)"),
        ({"window_size": (1,)}, "window_size"),
        ({"window_size": (1.5, 0)}, "window_size"),
        ({"cu_seqlens": [0, 5], "seqlen": 8}, "must end at the sequence length 8, got 5"),
        ({"cu_seqlens": [1, 8]}, r"0 = c0 < c1 < ... = S, got \(1, 8\)"),
        ({"cu_seqlens": [0, 4, 4, 8]}, "cu_seqlens must be 0 = c0"),
        ({"cu_seqlens": [0]}, "cu_seqlens must be 0 = c0"),
    ),
)
def test_a_malformed_mask_is_refused(words, says):
    with pytest.raises(ValueError, match=says):
        make_mask(**words)
