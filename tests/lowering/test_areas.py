"""Areas of masks in closed form, against counts of their (query, key) pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.areas import band_area, computed_area, mask_area, tile_area, unevenness
from wf_backends.lowering.tiles import Tile, make_tiles
from wf_backends.schedule.layout import make_layout
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask

MASKS = (Mask(), Mask(CAUSAL), Mask(Band(20, 0)), Mask(CAUSAL, (0, 10, 60, 96)))


@given(
    rows=st.integers(1, 30),
    keys=st.integers(1, 30),
    left=st.one_of(st.just(float("inf")), st.integers(-20, 40)),
    width=st.one_of(st.just(float("inf")), st.integers(0, 40)),
)
def test_the_area_of_a_band_counts_its_pairs(
    rows: int, keys: int, left: float, width: float
) -> None:
    right = width if left == float("inf") else width - left
    pairs = [(i, j) for i in range(rows) for j in range(keys) if -left <= j - i <= right]
    assert band_area(rows, keys, left, right) == len(pairs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_area_of_a_mask_is_that_of_its_tiles(mask: Mask) -> None:
    sequence = ((0, 96),)
    assert mask_area(mask, 96) == sum(map(tile_area, make_tiles(sequence, sequence, mask)))


@pytest.mark.parametrize(
    ("rows", "keys", "band", "hidden"),
    [
        (100, 100, FULL, 0),
        (100, 100, CAUSAL, 100 * 10),
        (100, 100, Band(20, 20), 2 * 100 * 10),  # two edges
        (100, 300, CAUSAL.shift(-100), 100 * 10),  # all rows are on the diagonal
        (300, 100, Band(right=-200), 100 * 10),  # as many as there are keys
        (6, 6, CAUSAL, 15),  # all pairs that the band hides: fewer than 10 a row
        (100, 100, Band(right=100), 0),  # it hides nothing
    ],
)
def test_a_kernel_computes_hidden_keys_along_each_edge_of_a_band(
    rows: int, keys: int, band: Band, hidden: float
) -> None:
    tile = Tile(((0, rows),), ((0, keys),), band)
    assert computed_area(tile, 10) == tile_area(tile) + hidden
    assert computed_area(tile, 0) == tile_area(tile)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("left", [30, 96, 170, 240, 330, 480, float("inf")])
def test_unevenness_of_a_window_is_that_of_counted_scores(layout: str, left: float) -> None:
    """Within 2 %: the closed form takes single rows for shards, which have ten tokens here."""
    seqlen, mask = 480, Mask(Band(left, 0))
    scores_by_rank = [
        sum(map(tile_area, make_tiles(shard, ((0, seqlen),), mask)))
        for shard in make_layout(layout, 48, seqlen)
    ]
    expected = max(scores_by_rank) * len(scores_by_rank) / mask_area(mask, seqlen)
    assert unevenness(mask, seqlen, layout) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("mask", [Mask(), Mask(CAUSAL, (0, 7, 480))], ids=str)
def test_full_masks_and_documents_count_as_even(mask: Mask) -> None:
    assert unevenness(mask, 480, "contiguous") == 1
