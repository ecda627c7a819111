"""Tiles: together they are the mask, none is larger than needed, and there are few of them."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import visible
from tests.schedule.positions import drawn_ranges, positions
from tests.slices import block_causal, drawn_slices
from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.tiles import SHORT_RANGE_ROWS, Tile, by_part, make_tiles, seen
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.ranges import join, size
from wf_backends.schedule.routes import concentric, ring

SEQLEN = 24
ranges = drawn_ranges(SEQLEN, max_ranges=4)
bounds = st.sampled_from((inf, 0, 1, 3, 9))
borders = st.sets(st.integers(1, SEQLEN - 1), max_size=5).map(
    lambda cuts: (0, *sorted(cuts), SEQLEN)
)
masks_in_slices = drawn_slices(SEQLEN).map(lambda slice_lists: make_mask(**slice_lists))
masks = st.builds(Mask, st.builds(Band, bounds, bounds), st.none() | borders) | masks_in_slices


def visible_pairs(q, kv, mask):
    """(row of the queries' buffer, row of the keys' buffer) of all pairs that the mask allows."""
    allowed = visible(mask, SEQLEN, SEQLEN)
    rows, keys = enumerate(positions(q)), list(enumerate(positions(kv)))
    return [(row, key) for row, p in rows for key, k in keys if allowed[p, k]]


def pairs_of_tile(tile):
    """The same of one tile."""
    return [
        (row, key)
        for i, row in enumerate(positions(tile.rows))
        for j, key in enumerate(positions(tile.keys))
        if -tile.band.left <= j - i <= tile.band.right
    ]


@settings(max_examples=150)
@given(ranges, ranges, masks, st.booleans())
def test_every_visible_pair_lies_in_exactly_one_trimmed_tile(q, kv, mask, same_positions):
    kv = q if same_positions else kv
    expected, covered = visible_pairs(q, kv, mask), []
    for tile in make_tiles(q, kv, mask):
        pairs = pairs_of_tile(tile)
        assert {row for row, _ in pairs} == set(positions(tile.rows)), "a row that sees no key"
        assert {key for _, key in pairs} == set(positions(tile.keys)), "a key that no row sees"
        assert len(pairs) == tile_area(tile)
        covered += pairs
    assert sorted(covered) == expected
    rows, keys = positions(q), positions(kv)
    seen_rows, seen_keys = seen(by_part(q, mask, "q"), by_part(kv, mask, "k"), mask)
    assert positions(seen_rows) == sorted({rows[row] for row, _ in expected})
    assert positions(seen_keys) == sorted({keys[key] for _, key in expected})


@given(ranges, ranges, masks)
def test_every_tile_is_a_legal_flash_attention_window(q, kv, mask):
    """flash-attn aligns windows at the bottom right and takes no negative ones."""
    for tile in make_tiles(q, kv, mask):
        more_keys = size(tile.keys) - size(tile.rows)
        assert tile.band.left + more_keys >= 0
        assert tile.band.right - more_keys >= 0


def num_tiles(schedule, layout):
    """By rank, its tiles in all steps under a causal mask."""
    problem = Problem(schedule, layout, layout, Mask(CAUSAL))
    programs = [lower(problem, rank) for rank in range(schedule.num_ranks)]
    rounds = [[r for step in program.steps for r in step.rounds] for program in programs]
    return [sum(len(round_.tiles) for round_ in of_rank) for of_rank in rounds]


def test_neighbouring_full_tiles_of_a_team_join():
    """All pairs of a rank are one tile: 4 shards of queries, 4 of keys, of two chunks each."""
    layout, schedule = zigzag(16, 64), concentric(16, 4)
    for rank in range(16):
        shards = (schedule.q[rank], schedule.kv[rank])
        rows, keys = (join(piece for s in side for piece in layout[s]) for side in shards)
        assert len(make_tiles(rows, keys, Mask(CAUSAL))) == 1


def test_a_causal_ring_computes_one_tile_a_step_at_most():
    assert num_tiles(ring(8), zigzag(8, 64)) == [8] * 8
    assert num_tiles(ring(8), contiguous(8, 64)) == list(range(1, 9))


def test_a_zigzag_shard_on_itself_is_one_causal_tile():
    shard = zigzag(4, 64)[1]
    (tile,) = make_tiles(shard, shard, Mask(CAUSAL))
    assert tile.band == CAUSAL and tile.rows == tile.keys == ((0, 16),)


def test_positions_that_are_both_rows_and_keys_are_one_causal_tile():
    """A shard against itself and another one: one diagonal, and the keys of the other shard."""
    shard, all_keys = ((0, 4), (12, 16)), ((0, 16),)
    diagonal, rest = make_tiles(shard, all_keys, Mask(CAUSAL))
    assert diagonal == Tile(((0, 8),), shard, CAUSAL)
    assert rest == Tile(((4, 8),), ((4, 12),), FULL)


def test_long_ranges_are_not_copied_into_one_tile():
    """Long diagonals of their own waste few scores: a copy would cost more."""
    rows = ((0, SHORT_RANGE_ROWS + 1), (3 * SHORT_RANGE_ROWS, 4 * SHORT_RANGE_ROWS))
    all_keys = ((0, 4 * SHORT_RANGE_ROWS),)
    for tile in make_tiles(rows, all_keys, Mask(CAUSAL)):
        assert len(tile.rows) == len(tile.keys) == 1


def test_neighbouring_full_slices_are_one_tile():
    mask = make_mask(**block_causal(4, SEQLEN))
    assert len(make_tiles(((16, 24),), ((0, 16),), mask)) == 1
    assert len(make_tiles(((16, 24),), ((0, 24),), mask)) == 2


def test_bounds_that_hide_nothing_are_dropped():
    (tile,) = make_tiles(((8, 12),), ((2, 5),), Mask(Band(left=10, right=0)))
    assert tile.band == FULL
