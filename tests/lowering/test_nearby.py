"""Whose rows lie near: exactly the shards that tiles would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.derivation import Nearby
from wf_backends.lowering.tiles import tiles
from wf_backends.schedule.layout import make_layout
from wf_backends.schedule.mask import Band, Mask


@given(
    ranks=st.integers(1, 9),
    length=st.integers(20, 80),
    left=st.integers(0, 90),
    right=st.integers(0, 90),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    queries=st.booleans(),
)
def test_near_are_the_shards_that_have_tiles(
    ranks: int, length: int, left: int, right: int, layout: str, queries: bool
) -> None:
    """`queries`: whether those that are looked for are shards of queries."""
    mask, home = Mask(Band(left, right)), make_layout(layout, ranks, length, (0, length))
    nearby = Nearby(home, mask.band, queries)
    for shard in home:
        sides = [(other, shard) if queries else (shard, other) for other in home]
        met = [at for at, (rows, keys) in enumerate(sides) if tiles(rows, keys, mask)]
        assert nearby.of(shard) == frozenset(met)
