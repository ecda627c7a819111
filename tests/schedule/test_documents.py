"""The layout of packed documents: every token has one owner, work and tokens are even, and few
documents are cut."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schedule.positions import owned_positions
from wf_backends.lowering.areas import tile_area
from wf_backends.lowering.tiles import make_tiles
from wf_backends.schedule import filling
from wf_backends.schedule.filling import Segment, count_scores
from wf_backends.schedule.filling import excess as excess_of
from wf_backends.schedule.layout import document_zigzag, make_layout
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.ranges import intersect

DISTRIBUTIONS = ("log-normal", "zipf", "giant", "equal", "tiny")


def drawn_documents(distribution, seed, min_tokens=32768):
    """The borders of drawn documents that hold `min_tokens` or a few more."""
    source, lengths = random.Random(seed), []
    draw_length = {
        "log-normal": lambda: source.lognormvariate(6, 1.2),
        "zipf": lambda: min_tokens / 4 / source.randint(1, 200) ** 1.1,
        "giant": lambda: min_tokens / 2 if not lengths else source.uniform(10, 300),
        "equal": lambda: 512,
        "tiny": lambda: source.randint(1, 40),
    }[distribution]
    while sum(lengths) < min_tokens:
        lengths.append(max(1, int(draw_length())))
    return borders(lengths)


def borders(lengths):
    """The cu_seqlens of documents of these lengths."""
    return (0, *accumulate(lengths))


def excess(layout, cu_seqlens):
    """Largest share / mean share - 1, of the causal scores or of the tokens."""
    return excess_of(layout, segments(cu_seqlens))


def segments(cu_seqlens):
    """The documents, with the scores of a causal mask inside them."""
    return [Segment(*document) for document in pairwise(cu_seqlens)]


def num_pieces(layout, cu_seqlens):
    """By document, the number of shards that hold some of its tokens."""
    documents = pairwise(cu_seqlens)
    return [sum(bool(intersect(shard, (document,))) for shard in layout) for document in documents]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("n", (2, 4, 8, 16))
def test_work_and_tokens_are_within_five_percent_of_even(distribution, n, seed):
    cu_seqlens = drawn_documents(distribution, seed)
    layout_excess = excess(document_zigzag(n, cu_seqlens), cu_seqlens)
    zigzag_excess = excess(make_layout("zigzag", n, cu_seqlens[-1]), cu_seqlens)
    assert layout_excess <= 0.05
    assert layout_excess <= max(zigzag_excess, 0.02)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("n", (32, 64))
def test_256_tokens_a_rank_are_within_five_percent_of_even(distribution, n, seed):
    cu_seqlens = drawn_documents(distribution, seed, min_tokens=256 * n)
    assert excess(document_zigzag(n, cu_seqlens), cu_seqlens) <= 0.05


def test_a_long_document_is_on_as_few_ranks_as_its_load_needs():
    """Four equal documents on 8 ranks: two ranks each."""
    cu_seqlens = borders([1000] * 4)
    layout = document_zigzag(8, cu_seqlens)
    assert excess(layout, cu_seqlens) == 0
    for start, stop in pairwise(cu_seqlens):
        assert sum(start <= shard[0][0] < stop for shard in layout) == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("n", (8, 64))
def test_at_most_two_documents_a_rank_are_cut(distribution, n, seed):
    cu_seqlens = drawn_documents(distribution, seed, min_tokens=1024 * n)
    pieces = num_pieces(document_zigzag(n, cu_seqlens), cu_seqlens)
    assert sum(pieces) <= len(pieces) + 2 * (n - 1)


def test_tolerated_unevenness_saves_cuts(monkeypatch):
    cu_seqlens = drawn_documents("zipf", 0)

    def total_pieces():
        layout = document_zigzag.__wrapped__(16, cu_seqlens)  # not the cached one
        return sum(num_pieces(layout, cu_seqlens))

    pieces_with_tolerance = total_pieces()
    monkeypatch.setattr(filling, "TOLERANCES", (0.0,))
    assert pieces_with_tolerance < total_pieces()


def test_documents_that_divide_evenly_are_not_cut():
    cu_seqlens = borders([100, 60, 40, 60, 100, 40] * 2)
    for shard in document_zigzag(4, cu_seqlens):
        assert {edge for piece in shard for edge in piece} <= set(cu_seqlens)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from((1, 2, 3, 4, 8)))
def test_every_token_has_one_owner(lengths, n):
    """A sequence of fewer than 4 tokens a rank may be refused instead."""
    cu_seqlens = borders(lengths)
    try:
        layout = document_zigzag(n, cu_seqlens)
    except ValueError as refusal:
        assert "too short" in str(refusal) and cu_seqlens[-1] < 4 * n
        return
    assert owned_positions(layout) == list(range(cu_seqlens[-1]))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from((1, 2, 3)))
def test_causal_scores_are_the_area_of_the_tiles(lengths, n):
    cu_seqlens = borders(lengths)
    seqlen, mask = cu_seqlens[-1], Mask(CAUSAL, cu_seqlens)
    assume(seqlen >= n)
    for shard in make_layout("contiguous", n, seqlen):
        areas = map(tile_area, make_tiles(shard, ((0, seqlen),), mask))
        assert count_scores(shard, segments(cu_seqlens)) == sum(areas)


def test_short_documents_stay_whole_beside_a_long_one_that_is_cut():
    cu_seqlens = borders([4000, 100, 100, 100, 100, 100, 100])
    layout = document_zigzag(2, cu_seqlens)
    for start, stop in list(pairwise(cu_seqlens))[1:]:
        assert any(a <= start and stop <= b for shard in layout for a, b in shard)
    assert all(shard[0][0] < 4000 for shard in layout)


def test_missing_documents_are_refused():
    with pytest.raises(ValueError, match=r"pass cu_seqlens \(\(0, 64\)"):
        make_layout("document_zigzag", 2, 64)


def test_documents_that_end_before_the_sequence_are_refused():
    with pytest.raises(ValueError, match="must end at the sequence length 64, got 60"):
        make_layout("document_zigzag", 2, 64, (0, 60))


def test_fewer_tokens_than_ranks_are_refused():
    with pytest.raises(ValueError, match="too short for the document_zigzag layout on 8"):
        document_zigzag(8, (0, 3))
