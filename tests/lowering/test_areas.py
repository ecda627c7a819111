"""Areas of masks in closed form, beside what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.areas import band_area, mask_area, tile_area, unevenness, wasted_area
from wf_backends.lowering.tiles import Tile, tiles
from wf_backends.schedule.layout import make_layout
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask

MASKS = (Mask(), Mask(CAUSAL), Mask(Band(20, 0)), Mask(CAUSAL, (0, 10, 60, 96)))


@given(
    rows=st.integers(1, 30),
    keys=st.integers(1, 30),
    left=st.one_of(st.just(float("inf")), st.integers(-20, 40)),
    width=st.one_of(st.just(float("inf")), st.integers(0, 40)),
)
def test_the_area_of_a_band_is_a_count(rows: int, keys: int, left: float, width: float) -> None:
    right = width if left == float("inf") else width - left
    seen = [(i, j) for i in range(rows) for j in range(keys) if -left <= j - i <= right]
    assert band_area(rows, keys, left, right) == len(seen)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_area_of_a_mask_is_that_of_its_tiles(mask: Mask) -> None:
    found = tiles(((0, 96),), ((0, 96),), mask)
    assert mask_area(mask, 96) == sum(map(tile_area, found))


@pytest.mark.parametrize(
    ("rows", "keys", "band", "in_vain"),
    [
        (100, 100, FULL, 0),
        (100, 100, CAUSAL, 100 * 10),
        (100, 100, Band(20, 20), 2 * 100 * 10),  # two edges
        (100, 300, CAUSAL.shift(-100), 100 * 10),  # all rows are on the diagonal
        (300, 100, Band(right=-200), 100 * 10),  # as many as there are keys
        (6, 6, CAUSAL, 15),  # no more than the band hides
        (100, 100, Band(right=100), 0),  # it hides nothing
    ],
)
def test_a_kernel_computes_some_keys_in_vain_along_an_edge(
    rows: int, keys: int, band: Band, in_vain: float
) -> None:
    tile = Tile(((0, rows),), ((0, keys),), band)
    assert wasted_area(tile, 10) == in_vain
    assert wasted_area(tile, 0) == 0


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("left", [30, 96, 170, 240, 330, 480, float("inf")])
def test_how_much_more_the_busiest_rank_has(layout: str, left: float) -> None:
    """Beside a count of every rank's; a shard of ten tokens is not as fine as a row."""
    seqlen, mask = 480, Mask(Band(left, 0))
    counts = [
        sum(map(tile_area, tiles(rows, ((0, seqlen),), mask)))
        for rows in make_layout(layout, 48, seqlen)
    ]
    most = max(counts) * len(counts) / mask_area(mask, seqlen)
    assert unevenness(mask, seqlen, layout) == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize("mask", [Mask(), Mask(CAUSAL, (0, 7, 480))], ids=str)
def test_what_is_taken_for_even(mask: Mask) -> None:
    assert unevenness(mask, 480, "contiguous") == 1
