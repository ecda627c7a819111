"""The contiguous and the zigzag layout: every token has one owner, and shards are even."""

from __future__ import annotations

import pytest

from tests.schedule.positions import owned_positions
from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.tiles import make_tiles
from wf_backends.schedule.layout import contiguous, lengths, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, Mask

RANKS = (1, 2, 3, 4, 6, 8, 16)


@pytest.mark.parametrize("name", ("contiguous", "zigzag"))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("seqlen", (32, 33, 61, 96))
def test_every_token_has_one_owner(name, n, seqlen):
    layout = make_layout(name, n, seqlen)
    assert owned_positions(layout) == list(range(seqlen))
    assert max(lengths(layout)) - min(lengths(layout)) <= 2
    assert all(shard == tuple(sorted(shard)) for shard in layout)


def test_a_zigzag_rank_owns_an_early_and_a_late_chunk():
    assert contiguous(2, 8) == (((0, 4),), ((4, 8),))
    assert zigzag(2, 8) == (((0, 2), (6, 8)), ((2, 6),))
    assert zigzag(3, 12) == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),))


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("name", "chunks"), (("contiguous", 1), ("zigzag", 2)))
def test_divisible_lengths_give_equal_shards(name, chunks, n):
    assert set(lengths(make_layout(name, n, 5 * n * chunks))) == {5 * chunks}


@pytest.mark.parametrize("n", RANKS)
def test_zigzag_gives_all_ranks_the_same_causal_work(n):
    seqlen = 8 * n
    all_keys = ((0, seqlen),)
    layout = zigzag(n, seqlen)
    work = [sum(map(tile_area, make_tiles(shard, all_keys, Mask(CAUSAL)))) for shard in layout]
    assert len(set(work)) == 1


@pytest.mark.parametrize(("name", "min_tokens"), (("contiguous", 4), ("zigzag", 8)))
def test_a_sequence_too_short_is_refused_with_the_length_it_needs(name, min_tokens):
    assert make_layout(name, 4, min_tokens)
    message = f"{min_tokens - 1} tokens is too short.*{name}.*at least {min_tokens}"
    with pytest.raises(ValueError, match=message):
        make_layout(name, 4, min_tokens - 1)


def test_an_unknown_layout_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'zigzag'"):
        make_layout("zig-zag", 2, 8)
