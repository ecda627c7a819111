"""Which tokens a rank owns.

Pure: standard library only. A layout gives every rank its shard: the sorted ranges of global
positions whose rows it holds, in sequence order. Sequence lengths need not divide: chunks then
differ by one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from itertools import pairwise
from math import ceil
from types import MappingProxyType

from wf_backends._validation import one_of
from wf_backends.schedule.filling import MAX_EXCESS, Segment, causal_load, fill_evenly, slices_load
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.ranges import Range, Ranges, join, size
from wf_backends.schedule.slices import Slice

Layout = tuple[Ranges, ...]  # rank -> its shard


def contiguous(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunk r of `num_ranks` chunks.

    Raises:
        ValueError: if there are fewer tokens than ranks.
    """
    return tuple((chunk,) for chunk in _chunks("contiguous", num_ranks, num_ranks, seqlen))


def zigzag(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunks r and 2P-1-r of 2P chunks: a causal mask then gives all the same work.

    Raises:
        ValueError: if there are fewer tokens than 2P chunks.

    Source: ring-flash-attention issue 2; PyTorch calls it "head-tail".
    """
    chunks = _chunks("zigzag", num_ranks, 2 * num_ranks, seqlen)
    return tuple(join((chunks[r], chunks[-1 - r])) for r in range(num_ranks))


@lru_cache(maxsize=64)
def document_zigzag(num_ranks: int, cu_seqlens: tuple[int, ...]) -> Layout:
    """Packed documents of any lengths, balanced: short ones whole on a rank, long ones zigzag.

    Shards may differ in length; a rank's load is its share of the causal scores (attention) or of
    the tokens (everything else), whichever is more. A row is sent to every rank that holds later
    rows of its document: documents of at most an even load stay whole if that comes out even, the
    largest given away first. If not, ranks are filled one after the other (`filling.fill_evenly`),
    which cuts at most two documents a rank that would fit one.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.

    Raises:
        ValueError: if there are so few tokens that a rank would get none.
    """
    load = causal_load(cu_seqlens)
    documents = sorted(load.segments, key=lambda one: (-one.length, one.start))
    layout = _deal(num_ranks, documents)
    if load.unevenness(layout) > MAX_EXCESS:
        layout = min(layout, fill_evenly(num_ranks, load, documents), key=load.unevenness)
    if not all(layout):
        raise _too_short("document_zigzag", cu_seqlens[-1], num_ranks, 2 * num_ranks)
    return layout


@lru_cache(maxsize=64)
def balanced(num_ranks: int, seqlen: int, slices: tuple[Slice, ...]) -> Layout:
    """A mask in slices, balanced: every rank has as many tokens and as many scores to compute.

    Token counts differ by one where the ranks do not divide the sequence. Ranks are in the order of
    their first tokens, so that neighbours on a ring are near.

    Raises:
        ValueError: if there are fewer tokens than ranks.
    """
    if seqlen < num_ranks:
        raise _too_short("balanced", seqlen, num_ranks, num_ranks)
    if beyond := [one.q for one in slices if one.q[1] > seqlen]:
        raise ValueError(
            f"q_ranges must end within the sequence of {seqlen} tokens, got {beyond[0]}"
        )
    load = slices_load(slices, seqlen)
    densest = sorted(load.segments, key=lambda one: (-one.density, one.start))
    return tuple(sorted(fill_evenly(num_ranks, load, densest)))


@dataclass(frozen=True, slots=True)
class LayoutKind:
    """A layout by name: how to build it."""

    build: Callable[..., Layout]
    """From the ranks, and from tokens, the documents' borders, or tokens and a mask's slices."""
    chunks_per_rank: int
    """A sequence length divisible by ranks x this gives every rank the same number of tokens; 0 =
    shards are not meant to be equal, nothing is padded for them."""
    needs_documents: bool = False
    """Whether the layout follows from the documents, so that none may be left unsaid."""
    needs_slices: bool = False
    """The same of the mask's slices."""


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
        ValueError: for an unknown name, a sequence too short, or documents or slices that the
            layout needs and that were not given or do not fit `seqlen`.
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


def layout_of(name: str, rows: Sequence[int], mask: Mask, what: str) -> Layout:
    """The layout called `name` whose shards have the lengths `rows`, by rank.

    Raises:
        ValueError: as `make_layout`, and naming `what` if there is no such layout.
    """
    layout = make_layout(name, len(rows), sum(rows), mask.cu_seqlens, mask.slices)
    if lengths(layout) != tuple(rows):
        raise ValueError(
            f"{what} must be the shards of the {name} layout: for {sum(rows)} tokens these have "
            f"{list(lengths(layout))} rows, got {list(rows)}"
        )
    return layout


def padding_multiple(name: str, num_ranks: int) -> int:
    """What to pad a sequence to a multiple of, so that all shards have the same length."""
    return max(1, num_ranks * LAYOUTS[name].chunks_per_rank)


def lengths(layout: Layout) -> tuple[int, ...]:
    """How many tokens each rank owns."""
    return tuple(size(shard) for shard in layout)


def _deal(num_ranks: int, documents: Sequence[Segment]) -> Layout:
    """Every document on as few ranks as it has even loads, those with the smallest so far."""
    all_scores = sum(one.area for one in documents)
    all_tokens = sum(one.length for one in documents)
    scores, tokens, loads = [0] * num_ranks, [0] * num_ranks, [0.0] * num_ranks
    shards: list[list[Range]] = [[] for _ in range(num_ranks)]
    for number, document in enumerate(documents):
        share = max(document.area / all_scores, document.length / all_tokens)
        count = min(num_ranks, max(1, ceil(share * num_ranks)))
        ranks = sorted(nsmallest(count, range(num_ranks), key=loads.__getitem__))
        edges = [place * document.length // count for place in range(count + 1)]
        for place, between in enumerate(pairwise(edges)):
            rank = ranks[(place + number) % count]  # edges round for one rank's good
            rows = join(document.rows(*between))
            shards[rank] += rows
            scores[rank] += sum(document.scores(*piece) for piece in rows)
            tokens[rank] += size(rows)
            loads[rank] = max(scores[rank] / all_scores, tokens[rank] / all_tokens)
    return tuple(map(join, shards))


def _chunks(name: str, num_ranks: int, num_chunks: int, seqlen: int) -> list[Range]:
    if seqlen < num_chunks:
        raise _too_short(name, seqlen, num_ranks, num_chunks)
    edges = [chunk * seqlen // num_chunks for chunk in range(num_chunks + 1)]
    return list(pairwise(edges))


def _too_short(name: str, seqlen: int, num_ranks: int, least: int) -> ValueError:
    return ValueError(
        f"a sequence of {seqlen} tokens is too short for the {name} layout on {num_ranks} "
        f"ranks: it needs at least {least} tokens, one for each chunk"
    )
