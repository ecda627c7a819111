"""Which tokens a rank owns.

A layout gives every rank its shard: sorted ranges of global positions, whose rows the rank holds in
this order. If a sequence length is not divisible, chunks differ by one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush, heapreplace
from itertools import pairwise, takewhile
from math import ceil
from types import MappingProxyType

from wf_backends._validation import one_of
from wf_backends.schedule.filling import MAX_EXCESS, Segment, excess, fill_evenly, segments_of
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.ranges import Range, Ranges, join, size
from wf_backends.schedule.slices import Slice

Layout = tuple[Ranges, ...]  # rank -> its shard


def contiguous(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunk r of `num_ranks` chunks."""
    return tuple((chunk,) for chunk in _chunks("contiguous", num_ranks, num_ranks, seqlen))


def zigzag(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunks r and 2P-1-r of 2P chunks: even work under a causal mask.

    Source: ring-flash-attention issue 2; PyTorch calls it "head-tail".
    """
    chunks = _chunks("zigzag", num_ranks, 2 * num_ranks, seqlen)
    return tuple(join((chunks[r], chunks[-1 - r])) for r in range(num_ranks))


@lru_cache(maxsize=64)
def document_zigzag(num_ranks: int, cu_seqlens: tuple[int, ...]) -> Layout:
    """Packed documents of any lengths, balanced: short documents stay whole, long ones are zigzag.

    Shards may differ in length. A rank's load is its share of the causal scores (attention) or of
    the tokens (everything else), whichever is larger. A cut document costs messages: each row goes
    to all ranks that hold later rows of its document. So documents that fit one rank stay whole,
    and go to ranks in order of length, the longest first. If that is too uneven, ranks are filled
    one after the other (`filling.fill_evenly`), which cuts at most two such documents per rank.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.
    """
    documents = [Segment(start, stop) for start, stop in pairwise(cu_seqlens)]
    layout = _assign_documents(num_ranks, documents)
    if excess(layout, documents) > MAX_EXCESS:
        filled = fill_evenly(num_ranks, documents)
        layout = min(layout, filled, key=partial(excess, segments=documents))
    if not all(layout):
        raise _too_short("document_zigzag", cu_seqlens[-1], num_ranks, 2 * num_ranks)
    return layout


@lru_cache(maxsize=64)
def balanced(num_ranks: int, seqlen: int, slices: tuple[Slice, ...]) -> Layout:
    """For a mask in slices: all ranks have nearly as many tokens and scores (see `fill_evenly`).

    Ranks are in the order of their first tokens, so that neighbours on a ring are near each other
    in the sequence.
    """
    if seqlen < num_ranks:
        raise _too_short("balanced", seqlen, num_ranks, num_ranks)
    Mask(slices=slices).check_lengths(seqlen, seqlen)
    return tuple(sorted(fill_evenly(num_ranks, segments_of(slices, seqlen))))


@dataclass(frozen=True, slots=True)
class LayoutKind:
    """How to build a layout, and from what."""

    build: Callable[..., Layout]
    """Called with num_ranks and seqlen; num_ranks and cu_seqlens; or num_ranks, seqlen, slices."""
    chunks_per_rank: int
    """Shards have equal lengths if num_ranks * chunks_per_rank divides the sequence length. 0 =
    shards may differ in length, and sequences are not padded for this layout."""
    needs_documents: bool = False
    """Whether the layout follows from the documents, so that `cu_seqlens` is required."""
    needs_slices: bool = False
    """Whether the layout follows from the slices of the mask, so that `slices` is required."""


LAYOUTS: Mapping[str, LayoutKind] = MappingProxyType(
    {
        "contiguous": LayoutKind(contiguous, 1),
        "zigzag": LayoutKind(zigzag, 2),
        "document_zigzag": LayoutKind(document_zigzag, 0, needs_documents=True),
        "balanced": LayoutKind(balanced, 0, needs_slices=True),
    }
)


def make_layout(
    name: str,
    num_ranks: int,
    seqlen: int,
    cu_seqlens: Sequence[int] | None = None,
    slices: Sequence[Slice] | None = None,
) -> Layout:
    """The layout called `name` for `seqlen` tokens on `num_ranks` ranks.

    Raises:
        ValueError: if the name is unknown, the sequence is too short, documents or slices that the
            layout needs are missing, or they do not fit `seqlen`.
    """
    one_of("layout", name, tuple(LAYOUTS))
    kind = LAYOUTS[name]
    if cu_seqlens is not None and cu_seqlens[-1] != seqlen:
        raise ValueError(
            f"cu_seqlens must end at the sequence length {seqlen}, got {cu_seqlens[-1]}"
        )
    if kind.needs_documents:
        if cu_seqlens is None:
            raise ValueError(
                f"the {name} layout follows from the documents: pass cu_seqlens ((0, {seqlen}) if "
                "there is one)"
            )
        return kind.build(num_ranks, tuple(cu_seqlens))
    if kind.needs_slices:
        if slices is None:
            raise ValueError(
                f"the {name} layout follows from the slices of the mask: pass q_ranges, k_ranges "
                "and attn_mask_types, the same to shard, unshard, positions and attention"
            )
        return kind.build(num_ranks, seqlen, tuple(slices))
    return kind.build(num_ranks, seqlen)


def layout_of(name: str, rows: Sequence[int], mask: Mask, tensor: str) -> Layout:
    """The layout called `name`, if its shards have the lengths `rows` (by rank).

    Raises:
        ValueError: as `make_layout`; or if shards have other lengths: names `tensor`.
    """
    layout = make_layout(name, len(rows), sum(rows), mask.cu_seqlens, mask.slices)
    if lengths(layout) != tuple(rows):
        raise ValueError(
            f"{tensor} must be the shards of the {name} layout: for {sum(rows)} tokens these have "
            f"{list(lengths(layout))} rows, got {list(rows)}"
        )
    return layout


def padding_multiple(name: str, num_ranks: int) -> int:
    """The multiple to which a layout in equal chunks pads; 1 for the others."""
    return max(1, num_ranks * LAYOUTS[name].chunks_per_rank)


def lengths(layout: Layout) -> tuple[int, ...]:
    """How many tokens each rank owns."""
    return tuple(size(shard) for shard in layout)


def _assign_documents(num_ranks: int, documents: Sequence[Segment]) -> Layout:
    """Give each document, the longest first, to as few ranks as its load needs: those with the
    smallest loads so far.

    Documents on several ranks are cut into equal parts, each with its mirror image (zigzag).
    """
    all_scores = sum(document.area for document in documents)
    all_tokens = sum(document.length for document in documents)
    scores, tokens = [0] * num_ranks, [0] * num_ranks
    least_first = [(0.0, rank) for rank in range(num_ranks)]  # a heap of (load, rank)
    shards: list[list[Range]] = [[] for _ in range(num_ranks)]

    def ranks_needed(document: Segment) -> int:
        share = max(document.area / all_scores, document.length / all_tokens)
        return min(num_ranks, ceil(share * num_ranks))

    def give(rank: int, rows: Sequence[Range], num_scores: int) -> tuple[float, int]:
        shards[rank] += rows
        scores[rank] += num_scores
        tokens[rank] += size(rows)
        return max(scores[rank] / all_scores, tokens[rank] / all_tokens), rank

    longest_first = sorted(documents, key=lambda document: (-document.length, document.start))
    counts = list(takewhile(lambda count: count > 1, map(ranks_needed, longest_first)))
    for number, (document, count) in enumerate(zip(longest_first, counts, strict=False)):
        ranks = sorted(heappop(least_first)[1] for _ in range(count))
        edges = [i * document.length // count for i in range(count + 1)]
        for i, (start, stop) in enumerate(pairwise(edges)):
            rows = document.rows(start, stop)
            num_scores = sum(document.scores(*piece) for piece in rows)
            rank = ranks[(i + number) % count]  # rotated, as edges always round down
            heappush(least_first, give(rank, rows, num_scores))
    for document in longest_first[len(counts) :]:  # short ones stay whole
        rows = [(document.start, document.stop)]
        heapreplace(least_first, give(least_first[0][1], rows, document.area))
    return tuple(map(join, shards))


def _chunks(name: str, num_ranks: int, num_chunks: int, seqlen: int) -> list[Range]:
    if seqlen < num_chunks:
        raise _too_short(name, seqlen, num_ranks, num_chunks)
    edges = [chunk * seqlen // num_chunks for chunk in range(num_chunks + 1)]
    return list(pairwise(edges))


def _too_short(name: str, seqlen: int, num_ranks: int, min_tokens: int) -> ValueError:
    return ValueError(
        f"a sequence of {seqlen} tokens is too short for the {name} layout on {num_ranks} "
        f"ranks: it needs at least {min_tokens} tokens, one for each chunk"
    )
