"""The balanced layout: every token once, as many tokens and as many scores on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.magi_masks import MASKS
from tests.slices import SEQLEN, SLICES, block_causal, drawn_slices, sliced
from wf_backends.lowering.areas import mask_area, tile_area
from wf_backends.lowering.tiles import tiles
from wf_backends.schedule.filling import Load, segments_of
from wf_backends.schedule.layout import lengths, make_layout, zigzag
from wf_backends.schedule.mask import make_mask


def scores(layout, mask, seqlen):
    """What each rank computes, counted from the tiles of its queries against all keys."""
    return [sum(map(tile_area, tiles(shard, ((0, seqlen),), mask))) for shard in layout]


def off(values):
    """How far the worst rank is from the mean."""
    return max(abs(value * len(values) / sum(values) - 1) for value in values)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", (2, 3, 4, 8, 16))
def test_named_masks_are_within_five_percent_of_even(name, n):
    seqlen, told = MASKS[name]
    mask = make_mask(**told)
    layout = make_layout("balanced", n, seqlen, slices=mask.slices)
    found = scores(layout, mask, seqlen)
    assert sum(found) == mask_area(mask, seqlen)
    assert off(found) <= 0.05 and off(lengths(layout)) <= 0.05
    assert max(map(len, layout)) <= 7, "pieces of a shard"


@pytest.mark.parametrize("name", [name for name, (tokens, _) in MASKS.items() if tokens > 8000])
def test_long_masks_are_even_on_many_ranks_too(name):
    seqlen, told = MASKS[name]
    mask = make_mask(**told)
    layout = make_layout("balanced", 64, seqlen, slices=mask.slices)
    assert off(scores(layout, mask, seqlen)) <= 0.05 and off(lengths(layout)) <= 0.05


def test_a_layout_that_does_not_look_at_the_mask_is_uneven():
    seqlen, told = MASKS["varlen_block_causal_144k"]
    mask = make_mask(**told)
    assert off(scores(zigzag(8, seqlen), mask, seqlen)) > 0.3


@pytest.mark.parametrize("n", (2, 4, 8))
def test_simple_masks_are_cut_as_by_hand(n):
    full, causal = (make_mask(**sliced((0, 64, 0, 64, kind))).slices for kind in ("full", "causal"))
    assert make_layout("balanced", n, 64, slices=full) == make_layout("contiguous", n, 64)
    size = 64 // n // 2
    outside_in = make_layout("balanced", n, 64, slices=causal)
    assert outside_in == tuple(
        ((r * size, r * size + size), (64 - r * size - size, 64 - r * size))
        if r < n - 1
        else ((r * size, 64 - r * size),)
        for r in range(n)
    )


def test_frames_of_a_video_are_dealt_whole():
    mask = make_mask(**block_causal(8, 64))
    for shard in make_layout("balanced", 4, 64, slices=mask.slices):
        assert all(start % 8 == stop % 8 == 0 for start, stop in shard)


@given(drawn_slices(), st.sampled_from((1, 2, 3, 4, 8)))
def test_every_token_has_one_owner(told, n):
    layout = make_layout("balanced", n, SEQLEN, slices=make_mask(**told).slices)
    assert sorted(p for shard in layout for a, b in shard for p in range(a, b)) == [*range(SEQLEN)]
    assert max(lengths(layout)) - min(lengths(layout)) <= 2


@given(drawn_slices())
def test_segments_tell_how_many_keys_each_query_sees(told):
    mask = make_mask(**told)
    found = segments_of(mask.slices, SEQLEN)
    assert [one.start for one in found] + [SEQLEN] == [0] + [one.stop for one in found]
    rows = [((p, p + 1),) for p in range(SEQLEN)]
    assert [Load(found).scores(row) for row in rows] == scores(rows, mask, SEQLEN)


@pytest.mark.parametrize("name", SLICES)
def test_few_segments(name):
    assert len(segments_of(make_mask(**SLICES[name]).slices, SEQLEN)) <= 12


def test_slices_must_be_given_and_lie_in_the_sequence():
    with pytest.raises(ValueError, match="pass q_ranges, k_ranges and attn_mask_types, the same"):
        make_layout("balanced", 2, 64)
    slices = make_mask(**SLICES["prefix_lm"]).slices
    with pytest.raises(ValueError, match=r"end within the sequence of 20 tokens, got \(11, 37\)"):
        make_layout("balanced", 2, 20, slices=slices)
    with pytest.raises(ValueError, match="too short for the balanced layout on 8"):
        make_layout("balanced", 8, 7, slices=())
