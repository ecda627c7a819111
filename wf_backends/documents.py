"""The layout of packed documents of any lengths: whole where they are short, zigzag where long.

Pure: standard library only. A rank's load is its share of the causal work (attention) or of the
tokens (everything else), whichever is more; 1 / num_ranks is even.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise

from wf_backends.ranges import Range, Ranges, join, size

TOLERATED = 0.02  # how far the busiest rank may be above the mean before another document is cut


@lru_cache(maxsize=64)
def deal_documents(num_ranks: int, cu_seqlens: tuple[int, ...]) -> tuple[Ranges, ...]:
    """The shards of a packed sequence, as even as they get with as few documents cut as it takes.

    A document that is cut is a zigzag over all ranks of its own; the others go whole, the largest
    first, to the rank that has the least. Nothing needs to divide, and shards may differ in length.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.
    """
    documents = sorted(pairwise(cu_seqlens), key=lambda d: (d[0] - d[1], d))
    tries = [0]
    while tries[-1] < len(documents):
        tries.append(min(len(documents), max(tries[-1] + 1, tries[-1] * 5 // 4)))
    best, least = None, float("inf")
    for num_cut in tries:
        shards = _deal(num_ranks, documents, num_cut)
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


def _deal(num_ranks: int, documents: Sequence[Range], num_cut: int) -> tuple[Ranges, ...]:
    """Cut the first `num_cut` documents over all ranks, give the others away whole."""
    shards: list[list[Range]] = [[] for _ in range(num_ranks)]
    work, tokens = [0] * num_ranks, [0] * num_ranks

    def give(rank: int, document: Range, piece: Range) -> None:
        if piece[0] < piece[1]:
            shards[rank].append(piece)
            work[rank] += _area(piece[0] - document[0], piece[1] - document[0])
            tokens[rank] += piece[1] - piece[0]

    all_work = sum(_area(0, stop - start) for start, stop in documents)
    all_tokens = sum(stop - start for start, stop in documents)
    for number, document in enumerate(documents[:num_cut]):
        chunks = _chunks(*document, 2 * num_ranks)
        for place in range(num_ranks):
            rank = (place + number) % num_ranks  # edges round for one rank's good: take turns
            give(rank, document, chunks[place])
            give(rank, document, chunks[-1 - place])

    def load(rank: int) -> tuple[float, int]:
        return max(work[rank] / all_work, tokens[rank] / all_tokens), rank

    waiting = [load(rank) for rank in range(num_ranks)]
    heapify(waiting)
    for document in documents[num_cut:]:
        rank = waiting[0][1]
        give(rank, document, document)
        heapreplace(waiting, load(rank))
    return tuple(join(shard) for shard in shards)


def _chunks(start: int, stop: int, num_chunks: int) -> list[Range]:
    length = stop - start
    edges = [start + chunk * length // num_chunks for chunk in range(num_chunks + 1)]
    return list(pairwise(edges))
