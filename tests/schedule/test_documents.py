"""Packed documents of any lengths: every token once, work and tokens even, few documents cut."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.tiles import tiles
from wf_backends.schedule import filling
from wf_backends.schedule.filling import causal_load
from wf_backends.schedule.layout import document_zigzag, make_layout
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.ranges import intersect

RANKS = (2, 4, 8, 16)


def unevenness(layout, packed):
    return causal_load(packed).excess(layout)


def borders(lengths):
    return (0, *accumulate(lengths))


def drawn(kind, seed, total=32768):
    """Document lengths that add up to at least `total`."""
    source, lengths = random.Random(seed), []
    draw = {
        "log-normal": lambda: source.lognormvariate(6, 1.2),
        "zipf": lambda: total / 4 / source.randint(1, 200) ** 1.1,
        "giant": lambda: total / 2 if not lengths else source.uniform(10, 300),
        "equal": lambda: 512,
        "tiny": lambda: source.randint(1, 40),
    }[kind]
    while sum(lengths) < total:
        lengths.append(max(1, int(draw())))
    return lengths


@pytest.mark.parametrize("kind", ("log-normal", "zipf", "giant", "equal", "tiny"))
@pytest.mark.parametrize("n", RANKS)
def test_work_and_tokens_are_within_five_percent_of_even(kind, n):
    for seed in range(4):
        packed = borders(drawn(kind, seed))
        layout = document_zigzag(n, packed)
        assert unevenness(layout, packed) <= 0.05
        zigzag = unevenness(make_layout("zigzag", n, packed[-1]), packed)
        assert unevenness(layout, packed) <= max(zigzag, 0.02)


@pytest.mark.parametrize("kind", ("log-normal", "zipf", "giant", "equal", "tiny"))
@pytest.mark.parametrize("n", (32, 64))
def test_few_tokens_on_many_ranks_are_even_too(kind, n):
    for seed in range(3):
        packed = borders(drawn(kind, seed, total=256 * n))
        assert unevenness(document_zigzag(n, packed), packed) <= 0.05


def test_a_long_document_is_on_as_few_ranks_as_it_takes():
    packed = borders([1000] * 4)
    layout = document_zigzag(8, packed)
    assert unevenness(layout, packed) == 0
    for document in pairwise(packed):
        assert sum(document[0] <= shard[0][0] < document[1] for shard in layout) == 2


@pytest.mark.parametrize("kind", ("log-normal", "zipf", "giant", "equal", "tiny"))
@pytest.mark.parametrize("n", (8, 64))
def test_few_documents_are_cut(kind, n):
    """Beside what a long one needs, at most two pieces a rank, one at either end."""
    for seed in range(3):
        packed = borders(drawn(kind, seed, total=1024 * n))
        layout = document_zigzag(n, packed)
        pieces = [sum(bool(intersect(shard, (d,))) for shard in layout) for d in pairwise(packed)]
        assert sum(pieces) <= len(pieces) + 2 * (n - 1)


def test_a_little_unevenness_spares_documents(monkeypatch):
    def pieces():
        shards = document_zigzag.__wrapped__(16, packed)
        return sum(bool(intersect(shard, (d,))) for shard in shards for d in pairwise(packed))

    packed = borders(drawn("zipf", 0))
    spared = pieces()
    monkeypatch.setattr(filling, "TOLERANCES", (0.0,))
    assert spared < pieces()


def test_documents_that_come_out_even_are_not_cut():
    packed = borders([100, 60, 40, 60, 100, 40] * 2)
    for shard in document_zigzag(4, packed):
        assert {edge for piece in shard for edge in piece} <= set(packed)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from((1, 2, 3, 4, 8)))
def test_every_token_has_one_owner(lengths, n):
    packed = borders(lengths)
    try:
        layout = document_zigzag(n, packed)
    except ValueError as refusal:
        assert "too short" in str(refusal) and packed[-1] < 4 * n
        return
    owned = sorted(p for shard in layout for a, b in shard for p in range(a, b))
    assert owned == list(range(packed[-1]))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from((1, 2, 3)))
def test_causal_scores_are_the_area_of_the_tiles(lengths, n):
    packed = borders(lengths)
    mask, everything = Mask(CAUSAL, packed), ((0, packed[-1]),)
    for shard in make_layout("contiguous", n, max(packed[-1], n)):
        if packed[-1] < n:
            return
        assert causal_load(packed).scores(shard) == sum(
            map(tile_area, tiles(shard, everything, mask))
        )


def test_short_documents_stay_whole_and_a_long_one_is_cut():
    packed = borders([4000, 100, 100, 100, 100, 100, 100])
    layout = document_zigzag(2, packed)
    for start, stop in list(pairwise(packed))[1:]:
        assert any(a <= start and stop <= b for shard in layout for a, b in shard)
    assert all(shard[0][0] < 4000 for shard in layout)


def test_documents_must_be_given_and_end_at_the_sequence():
    with pytest.raises(ValueError, match=r"pass cu_seqlens \(\(0, 64\)"):
        make_layout("document_zigzag", 2, 64)
    with pytest.raises(ValueError, match="must end at the sequence length 64, got 60"):
        make_layout("document_zigzag", 2, 64, (0, 60))
    with pytest.raises(ValueError, match="too short for the document_zigzag layout on 8"):
        document_zigzag(8, (0, 3))
