"""Layouts cut a sequence into shards: every token once, evenly, in order."""

from __future__ import annotations

import pytest

from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.tiles import tiles
from wf_backends.schedule.layout import lengths, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, Mask

RANKS = (1, 2, 3, 4, 6, 8, 16)


@pytest.mark.parametrize("name", ("contiguous", "zigzag"))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("seqlen", (32, 33, 61, 96))
def test_every_token_has_one_owner(name, n, seqlen):
    layout = make_layout(name, n, seqlen)
    owned = sorted(p for shard in layout for a, b in shard for p in range(a, b))
    assert owned == list(range(seqlen))
    assert max(lengths(layout)) - min(lengths(layout)) <= 2
    assert all(shard == tuple(sorted(shard)) for shard in layout)


@pytest.mark.parametrize("n", RANKS)
def test_lengths_that_divide_give_equal_shards(n):
    for name, chunks in (("contiguous", 1), ("zigzag", 2)):
        assert set(lengths(make_layout(name, n, 5 * n * chunks))) == {5 * chunks}


@pytest.mark.parametrize("n", RANKS)
def test_zigzag_gives_all_ranks_the_same_causal_work(n):
    layout = zigzag(n, 8 * n)
    everything = ((0, 8 * n),)
    work = [sum(map(tile_area, tiles(shard, everything, Mask(CAUSAL)))) for shard in layout]
    assert max(work) / (sum(work) / n) == 1.0


@pytest.mark.parametrize(("name", "least"), (("contiguous", 4), ("zigzag", 8)))
def test_a_sequence_too_short_is_refused_with_what_it_needs(name, least):
    assert make_layout(name, 4, least)
    with pytest.raises(
        ValueError, match=f"{least - 1} tokens is too short.*{name}.*at least {least}"
    ):
        make_layout(name, 4, least - 1)


def test_an_unknown_layout_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'zigzag'"):
        make_layout("zig-zag", 2, 8)
