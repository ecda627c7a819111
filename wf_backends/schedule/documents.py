"""The layout of packed documents of any lengths: whole where they are short, zigzag where long.

Pure: standard library only. A rank's load is its share of the causal scores (attention) or of the
tokens (everything else), whichever is more; 1 / num_ranks is even. A row is sent to every rank that
holds later rows of its document, so a document is on as few ranks as even loads allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import pairwise
from math import ceil

from wf_backends.schedule.filling import EXCESSES, MAX_EXCESS, Load, Segment, fill
from wf_backends.schedule.ranges import Range, Ranges, join, span


@lru_cache(maxsize=64)
def deal_documents(num_ranks: int, cu_seqlens: tuple[int, ...]) -> tuple[Ranges, ...]:
    """The shards of a packed sequence: even, and with few documents cut.

    Documents of at most an even load stay whole if that comes out even, the largest given away
    first, to the ranks that have the least. If not, ranks are filled one after the other (see
    `filling.fill`), which cuts at most two documents a rank that would fit one.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.
    """
    load = causal_load(cu_seqlens)
    documents = sorted(load.segments, key=lambda one: (-one.length, one.start))
    best = _deal(num_ranks, documents)
    least = load.unevenness(best)
    for tolerated in EXCESSES:
        if least <= MAX_EXCESS:
            break
        shards = fill(num_ranks, documents, tolerated)
        uneven = load.unevenness(shards)
        if uneven < least:
            best, least = shards, uneven
    return best


def causal_load(cu_seqlens: Sequence[int]) -> Load:
    """What shards have to do under a causal mask inside documents."""
    return Load([Segment(start, stop) for start, stop in pairwise(cu_seqlens)])


class _Dealer:
    """Shards as they fill up, and the load of every rank."""

    def __init__(self, num_ranks: int, documents: Sequence[Segment]) -> None:
        self.shards: list[list[Range]] = [[] for _ in range(num_ranks)]
        self.scores, self.tokens = [0] * num_ranks, [0] * num_ranks
        self.loads = [0.0] * num_ranks
        self.all_scores = sum(one.scores(one.start, one.stop) for one in documents)
        self.all_tokens = sum(one.length for one in documents)

    def share(self, scores: int, tokens: int) -> float:
        """The share of all scores or of all tokens, the larger one."""
        return max(scores / self.all_scores, tokens / self.all_tokens)

    def idlest(self, count: int) -> list[int]:
        """The `count` ranks with the smallest loads, rising."""
        return sorted(nsmallest(count, range(len(self.loads)), key=self.loads.__getitem__))

    def give(self, rank: int, document: Segment, piece: Range) -> None:
        if piece[0] < piece[1]:
            self.shards[rank].append(piece)
            self.scores[rank] += document.scores(*piece)
            self.tokens[rank] += span(piece)
            self.loads[rank] = self.share(self.scores[rank], self.tokens[rank])


def _deal(num_ranks: int, documents: Sequence[Segment]) -> tuple[Ranges, ...]:
    """Every document on as few ranks as it has even loads, one after the other."""
    dealer = _Dealer(num_ranks, documents)
    for number, document in enumerate(documents):
        start, stop, *_ = document
        length = stop - start
        wanted = ceil(dealer.share(document.scores(start, stop), length) * num_ranks)
        ranks = dealer.idlest(min(num_ranks, max(1, wanted)))
        edges = [place * length // len(ranks) for place in range(len(ranks) + 1)]
        for place, between in enumerate(pairwise(edges)):
            rank = ranks[(place + number) % len(ranks)]  # edges round for one rank's good
            for piece in document.rows(*between):
                dealer.give(rank, document, piece)
    return tuple(join(shard) for shard in dealer.shards)
