"""The balanced layout: every token has one owner, and ranks have equal tokens and equal scores.

A score is a (query, key) pair that the mask lets through.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.magi_masks import MASKS
from tests.schedule.positions import owned_positions
from tests.slices import SEQLEN, SLICES, block_causal, drawn_slices, sliced
from wf_backends.lowering.areas import mask_area, tile_area
from wf_backends.lowering.tiles import make_tiles
from wf_backends.schedule.filling import count_scores, segments_of
from wf_backends.schedule.layout import lengths, make_layout, zigzag
from wf_backends.schedule.mask import make_mask


def scores_by_rank(layout, mask, seqlen):
    """The scores of each rank, counted from the tiles of its queries against all keys."""
    return [sum(map(tile_area, make_tiles(shard, ((0, seqlen),), mask))) for shard in layout]


def deviation(values):
    """The largest |value / mean - 1|."""
    return max(abs(value * len(values) / sum(values) - 1) for value in values)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", (2, 3, 4, 8, 16))
def test_named_masks_are_within_five_percent_of_even(name, n):
    seqlen, slice_lists = MASKS[name]
    mask = make_mask(**slice_lists)
    layout = make_layout("balanced", n, seqlen, slices=mask.slices)
    scores = scores_by_rank(layout, mask, seqlen)
    assert sum(scores) == mask_area(mask, seqlen)
    assert deviation(scores) <= 0.05 and deviation(lengths(layout)) <= 0.05
    assert max(map(len, layout)) <= 7, "ranges in a shard"


@pytest.mark.parametrize("name", [name for name, (seqlen, _) in MASKS.items() if seqlen > 8000])
def test_long_masks_are_within_five_percent_of_even_on_64_ranks(name):
    seqlen, slice_lists = MASKS[name]
    mask = make_mask(**slice_lists)
    layout = make_layout("balanced", 64, seqlen, slices=mask.slices)
    assert deviation(scores_by_rank(layout, mask, seqlen)) <= 0.05
    assert deviation(lengths(layout)) <= 0.05


def test_zigzag_is_uneven_under_a_block_causal_mask():
    seqlen, slice_lists = MASKS["varlen_block_causal_144k"]
    mask = make_mask(**slice_lists)
    assert deviation(scores_by_rank(zigzag(8, seqlen), mask, seqlen)) > 0.3


@pytest.mark.parametrize("n", (2, 4, 8))
@pytest.mark.parametrize(("mask_type", "layout"), (("full", "contiguous"), ("causal", "zigzag")))
def test_one_full_slice_is_cut_contiguously_and_one_causal_slice_in_zigzag(mask_type, layout, n):
    slices = make_mask(**sliced((0, 64, 0, 64, mask_type))).slices
    assert make_layout("balanced", n, 64, slices=slices) == make_layout(layout, n, 64)


def test_frames_of_a_video_are_not_cut():
    mask = make_mask(**block_causal(8, 64))
    for shard in make_layout("balanced", 4, 64, slices=mask.slices):
        assert all(start % 8 == stop % 8 == 0 for start, stop in shard)


@given(drawn_slices(), st.sampled_from((1, 2, 3, 4, 8)))
def test_every_token_has_one_owner(slice_lists, n):
    layout = make_layout("balanced", n, SEQLEN, slices=make_mask(**slice_lists).slices)
    assert owned_positions(layout) == list(range(SEQLEN))
    assert max(lengths(layout)) - min(lengths(layout)) <= 2


@given(drawn_slices())
def test_segments_count_the_keys_that_each_query_sees(slice_lists):
    mask = make_mask(**slice_lists)
    segments = segments_of(mask.slices, SEQLEN)
    starts, stops = [s.start for s in segments], [s.stop for s in segments]
    assert starts + [SEQLEN] == [0] + stops
    rows = [((p, p + 1),) for p in range(SEQLEN)]
    assert [count_scores(row, segments) for row in rows] == scores_by_rank(rows, mask, SEQLEN)


@pytest.mark.parametrize("name", SLICES)
def test_masks_of_models_have_few_segments(name):
    assert len(segments_of(make_mask(**SLICES[name]).slices, SEQLEN)) <= 12


def test_missing_slices_are_refused():
    with pytest.raises(ValueError, match="pass q_ranges, k_ranges and attn_mask_types, the same"):
        make_layout("balanced", 2, 64)


def test_slices_beyond_the_sequence_are_refused():
    slices = make_mask(**SLICES["prefix_lm"]).slices
    with pytest.raises(ValueError, match=r"slice 1 ends beyond .* 20 tokens, got \(11, 37\)"):
        make_layout("balanced", 2, 20, slices=slices)


def test_fewer_tokens_than_ranks_are_refused():
    with pytest.raises(ValueError, match="too short for the balanced layout on 8"):
        make_layout("balanced", 8, 7, slices=())
