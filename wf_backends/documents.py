"""The layout of packed documents of any lengths: whole where they are short, zigzag where long.

Pure: standard library only. A rank's load is its share of the causal work (attention) or of the
tokens (everything else), whichever is more; 1 / num_ranks is even.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import pairwise
from math import ceil

from wf_backends.ranges import Range, Ranges, join, size

TOLERATED = 0.02  # how far the busiest rank may be above the mean before pieces get smaller
PIECES = tuple(0.5 ** (half / 2) for half in range(17))  # of an even load


@lru_cache(maxsize=64)
def deal_documents(num_ranks: int, cu_seqlens: tuple[int, ...]) -> tuple[Ranges, ...]:
    """The shards of a packed sequence, as even as they get with pieces as large as that takes.

    A document is a zigzag over as many ranks as it takes for pieces of a certain size, which for a
    short one is one rank. Documents go to the ranks that have the least, the largest document
    first. Nothing needs to divide, and shards may differ in length.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.
    """
    documents = sorted(pairwise(cu_seqlens), key=lambda d: (d[0] - d[1], d))
    best, least = None, float("inf")
    for piece in PIECES:
        shards = _deal(num_ranks, documents, piece)
        uneven = unevenness(shards, cu_seqlens)
        if uneven < least:
            best, least = shards, uneven
        if uneven <= TOLERATED:
            break
    assert best is not None
    return best


def unevenness(shards: Sequence[Ranges], cu_seqlens: Sequence[int]) -> float:
    """How far the busiest rank is above the mean, in causal work or tokens, whichever is more."""
    loads = [causal_work(shard, cu_seqlens) for shard in shards], [size(shard) for shard in shards]
    return max(max(load) * len(load) / sum(load) - 1 for load in loads)


def causal_work(shard: Ranges, cu_seqlens: Sequence[int]) -> int:
    """How many scores a causal mask inside documents lets through for the shard's rows."""
    work = 0
    for start, stop in shard:
        document = bisect_right(cu_seqlens, start) - 1
        while start < stop:
            first, last = cu_seqlens[document], min(stop, cu_seqlens[document + 1])
            work += _area(start - first, last - first)
            start, document = last, document + 1
    return work


def _area(first_row: int, last_row: int) -> int:
    """Scores of the rows [first_row, last_row) of a causal document."""
    return (last_row - first_row) * (first_row + last_row + 1) // 2


class _Dealer:
    """Shards as they fill up, and the load of every rank."""

    def __init__(self, num_ranks: int, documents: Sequence[Range]) -> None:
        self.shards: list[list[Range]] = [[] for _ in range(num_ranks)]
        self.work, self.tokens = [0] * num_ranks, [0] * num_ranks
        self.loads = [0.0] * num_ranks
        self.all_work = sum(_area(0, stop - start) for start, stop in documents)
        self.all_tokens = sum(stop - start for start, stop in documents)

    def share(self, work: int, tokens: int) -> float:
        """Of the whole, whichever is more."""
        return max(work / self.all_work, tokens / self.all_tokens)

    def idlest(self, count: int) -> list[int]:
        """The ranks that have the least, in their order."""
        return sorted(nsmallest(count, range(len(self.loads)), key=self.loads.__getitem__))

    def give(self, rank: int, document: Range, piece: Range) -> None:
        if piece[0] < piece[1]:
            self.shards[rank].append(piece)
            self.work[rank] += _area(piece[0] - document[0], piece[1] - document[0])
            self.tokens[rank] += piece[1] - piece[0]
            self.loads[rank] = self.share(self.work[rank], self.tokens[rank])


def _deal(num_ranks: int, documents: Sequence[Range], piece: float) -> tuple[Ranges, ...]:
    """Give every document away in pieces of at most `piece` of an even load, if ranks suffice."""
    dealer = _Dealer(num_ranks, documents)
    for number, document in enumerate(documents):
        length = document[1] - document[0]
        wanted = ceil(dealer.share(_area(0, length), length) * num_ranks / piece)
        ranks = dealer.idlest(min(num_ranks, max(1, wanted)))
        if len(ranks) == 1:
            dealer.give(ranks[0], document, document)
            continue
        chunks = _chunks(*document, 2 * len(ranks))
        for place in range(len(ranks)):
            rank = ranks[(place + number) % len(ranks)]  # edges round for one rank's good
            dealer.give(rank, document, chunks[place])
            dealer.give(rank, document, chunks[-1 - place])
    return tuple(join(shard) for shard in dealer.shards)


def _chunks(start: int, stop: int, num_chunks: int) -> list[Range]:
    length = stop - start
    edges = [start + chunk * length // num_chunks for chunk in range(num_chunks + 1)]
    return list(pairwise(edges))
