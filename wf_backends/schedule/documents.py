"""The layout of packed documents of any lengths: whole where they are short, zigzag where long.

Pure: standard library only. A rank's load is its share of the causal work (attention) or of the
tokens (everything else), whichever is more; 1 / num_ranks is even. A row is sent to every rank that
holds later rows of its document, so a document is on as few ranks as even loads allow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import accumulate, pairwise, product
from math import ceil

from wf_backends.schedule.ranges import Range, Ranges, join, size

MAX_EXCESS = 0.02
"""How far the busiest rank may be above the mean, so that fewer documents are cut."""
EXCESSES = (MAX_EXCESS, MAX_EXCESS / 2, MAX_EXCESS / 4, 0.0)


@lru_cache(maxsize=64)
def deal_documents(num_ranks: int, cu_seqlens: tuple[int, ...]) -> tuple[Ranges, ...]:
    """The shards of a packed sequence: even, and with few documents cut.

    Documents of at most an even load stay whole if that comes out even, the largest given away
    first, to the ranks that have the least. If not, ranks are filled one after the other (see
    `_fill`), which cuts at most two documents a rank that would fit one.

    Args:
        cu_seqlens: the documents' borders 0 = c0 < c1 < ... = S.
    """
    documents = sorted(pairwise(cu_seqlens), key=lambda d: (d[0] - d[1], d))
    best = _deal(num_ranks, documents)
    least = unevenness(best, cu_seqlens)
    for tolerated in EXCESSES:
        if least <= MAX_EXCESS:
            break
        shards = _fill(num_ranks, documents, tolerated)
        uneven = unevenness(shards, cu_seqlens)
        if uneven < least:
            best, least = shards, uneven
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


def _deal(num_ranks: int, documents: Sequence[Range]) -> tuple[Ranges, ...]:
    """Every document on as few ranks as it has even loads, one after the other."""
    dealer = _Dealer(num_ranks, documents)
    for number, document in enumerate(documents):
        length = document[1] - document[0]
        wanted = ceil(dealer.share(_area(0, length), length) * num_ranks)
        ranks = dealer.idlest(min(num_ranks, max(1, wanted)))
        edges = [place * length // len(ranks) for place in range(len(ranks) + 1)]
        for place, between in enumerate(pairwise(edges)):
            rank = ranks[(place + number) % len(ranks)]  # edges round for one rank's good
            for piece in _rows(document, *between):
                dealer.give(rank, document, piece)
    return tuple(join(shard) for shard in dealer.shards)


def _rows(document: Range, start: int, stop: int) -> tuple[Range, Range]:
    """Some of a document's rows, from its ends inwards, so that work goes with the count of rows.

    The rows [a, b) and their mirror image take (b - a) * length together, wherever they lie.
    """
    first, last = document
    head = first + (start + 1) // 2, first + (stop + 1) // 2
    return head, (last - stop // 2, last - start // 2)


def _fill(num_ranks: int, documents: Sequence[Range], tolerated: float) -> tuple[Ranges, ...]:
    """Rank after rank gets its part of the longest and of the shortest documents that are left.

    Long documents have more work for their tokens than the mean, short ones less: of both ends
    together there is always an amount with as many tokens as the mean and as much work.

    Args:
        documents: the longest first.
        tolerated: how far a rank may be off the mean of what is left, to cut fewer documents.
    """
    line = _Line(documents)
    shards = list[Ranges]()
    first, last = 0, line.tokens
    for ranks in range(num_ranks, 0, -1):
        mean = (last - first) / ranks, line.work(first, last) / ranks
        front, back = line.ends(first, last, mean, tolerated) if ranks > 1 else (last - first, 0)
        shards.append(join((*line.rows(first, first + front), *line.rows(last - back, last))))
        first, last = first + front, last - back
    return tuple(shards)


class _Line:
    """The documents in a row, each as in `_rows`: a place is a count of tokens."""

    def __init__(self, documents: Sequence[Range]) -> None:
        self.documents = documents
        lengths = [stop - start for start, stop in documents]
        self.edges = list(accumulate(lengths, initial=0))
        self.done = list(accumulate((_area(0, length) for length in lengths), initial=0))
        self.tokens = self.edges[-1]

    def rows(self, start: int, stop: int) -> Iterator[Range]:
        """The rows between two places."""
        for at in range(self._at(start), len(self.documents)):
            edge, upto = self.edges[at : at + 2]
            if edge >= stop:
                return
            yield from _rows(self.documents[at], max(start, edge) - edge, min(stop, upto) - edge)

    def work(self, start: int, stop: int) -> float:
        """Scores of the rows between two places, of a causal mask."""
        return self._before(stop) - self._before(start)

    def ends(
        self, first: int, last: int, mean: tuple[float, float], tolerated: float
    ) -> tuple[int, int]:
        """(tokens from the front, tokens from the back) with the mean's tokens and work, nearly.

        Of all that are near enough those that cut the fewest documents.
        """
        tokens, work = mean
        whole = round(tokens)
        low, high = 0, whole
        while low < high:
            front = (low + high) // 2
            found = self.work(first, first + front) + self.work(last - whole + front, last)
            low, high = (front + 1, high) if found < work else (low, front)
        best = (2, 0.0), (low, whole - low)
        nearby = self._nearby(first + low), self._nearby(last - whole + low)
        for upto, since in product(*nearby):
            if not first <= upto <= since <= last:
                continue
            got = upto - first + last - since, self.work(first, upto) + self.work(since, last)
            off = max(abs(have / want - 1) for have, want in zip(got, mean, strict=True))
            cuts = (upto not in nearby[0][1:]) + (since not in nearby[1][1:])
            if off <= tolerated:
                best = min(best, ((cuts, off), (upto - first, last - since)))
        return best[1]

    def _nearby(self, place: int) -> tuple[int, int, int]:
        """The place itself, and the edges of documents before and behind it."""
        at = self._at(place)
        return place, self.edges[at], self.edges[min(at + 1, len(self.edges) - 1)]

    def _at(self, place: int) -> int:
        """The document at a place."""
        return min(bisect_right(self.edges, place), len(self.documents)) - 1

    def _before(self, place: int) -> float:
        at = self._at(place)
        length = self.edges[at + 1] - self.edges[at]
        return self.done[at] + (place - self.edges[at]) * (length + 1) / 2
