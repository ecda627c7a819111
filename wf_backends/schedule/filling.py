"""Shards filled one after the other, so that each has its part of the tokens and of the scores.

Pure: standard library only. A sequence is told in segments, in which the keys that a query sees
rise or fall evenly from token to token: packed documents are such segments, and so is what slices
of a mask make of a sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import inf
from typing import NamedTuple

from wf_backends.schedule.ranges import Range, Ranges, join, size
from wf_backends.schedule.slices import Slice

MAX_EXCESS = 0.02
"""How far the busiest rank may be above the mean, so that fewer segments are cut."""
EXCESSES = (MAX_EXCESS, MAX_EXCESS / 2, MAX_EXCESS / 4, 0.0)


class Segment(NamedTuple):
    """Tokens [start, stop), of which token p sees first + slope (p - start) keys."""

    start: int
    stop: int
    first: int = 1
    slope: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def density(self) -> float:
        """Keys that a token sees, in the mean."""
        return self.first + self.slope * (self.length - 1) / 2

    @property
    def area(self) -> int:
        """(query, key) pairs of all its tokens."""
        return self.scores(self.start, self.stop)

    def scores(self, start: int, stop: int) -> int:
        """(query, key) pairs of the tokens [start, stop), as far as they lie in the segment."""
        begin, end, first, slope = self
        a, b = max(start, begin) - begin, min(stop, end) - begin
        return (b - a) * (2 * first + slope * (a + b - 1)) // 2 if a < b else 0

    def rows(self, start: int, stop: int) -> tuple[Range, ...]:
        """The tokens start to stop in an order in which scores go with the count of tokens.

        From the ends inwards, if keys rise or fall: [a, b) and their mirror image see (b - a) *
        length * density keys together, wherever they lie.
        """
        first, last = self.start, self.stop
        if not self.slope or stop - start == last - first:
            return ((first + start, first + stop),)
        head = first + (start + 1) // 2, first + (stop + 1) // 2
        return head, (last - stop // 2, last - start // 2)


class Load:
    """Scores and tokens of shards, beside the mean.

    Args:
        segments: in the order of the sequence.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]

    def scores(self, shard: Ranges) -> int:
        """How many (query, key) pairs the shard's queries see."""
        found = 0
        for start, stop in shard:
            at = bisect_right(self._starts, start) - 1
            while at < len(self.segments) and self.segments[at].start < stop:
                found += self.segments[at].scores(start, stop)
                at += 1
        return found

    def unevenness(self, shards: Sequence[Ranges]) -> float:
        """How far the busiest rank is above the mean, in scores or tokens, whichever is more."""
        loads = [self.scores(shard) for shard in shards], [size(shard) for shard in shards]
        return max(max(load) * len(load) / sum(load) - 1 for load in loads if any(load))


def causal_load(cu_seqlens: Sequence[int]) -> Load:
    """What shards have to do under a causal mask inside documents."""
    return Load([Segment(start, stop) for start, stop in pairwise(cu_seqlens)])


def slices_load(slices: Sequence[Slice], seqlen: int) -> Load:
    """What shards have to do under a mask in slices."""
    return Load(segments_of(slices, seqlen))


def segments_of(slices: Sequence[Slice], seqlen: int) -> list[Segment]:
    """The sequence in segments, by how many keys its queries see in all slices together."""
    value, slope = Counter[int](), Counter[int]()  # changes at a token, of first - slope start
    for piece in (piece for one in slices for piece in _pieces(one)):
        for at, sign in ((piece.start, 1), (piece.stop, -1)):
            value[at] += sign * (piece.first - piece.slope * piece.start)
            slope[at] += sign * piece.slope
    edges = sorted({0, seqlen, *(at for at in value if at < seqlen)})
    found, base, rise = list[Segment](), 0, 0
    for start, stop in pairwise(edges):
        base, rise = base + value[start], rise + slope[start]
        if (value[start] or slope[start]) or not found:
            found.append(Segment(start, stop, base + rise * start, rise))
        else:  # one piece goes on as another ends
            found[-1] = found[-1]._replace(stop=stop)
    return found


def _pieces(one: Slice) -> Iterator[Segment]:
    """The queries of a slice in segments: keys rise, stay or fall from one to the next."""
    (q0, q1), (k0, k1) = one.q, one.k

    def keys(query: int) -> int:
        return int(min(k1, query + one.right + 1) - max(k0, query - one.left))

    first, last = int(max(q0, k0 - one.right)), int(min(q1, k1 + one.left))  # who see any
    turns = k1 - one.right, k0 + one.left + 1  # where keys stop rising, and begin to fall
    edges = sorted({first, last, *(int(at) for at in turns if first < at < last)})
    for start, stop in pairwise(edges):
        slope = keys(start + 1) - keys(start) if stop - start > 1 else 0
        yield Segment(start, stop, keys(start), slope)


def fill_evenly(num_ranks: int, load: Load, segments: Sequence[Segment]) -> tuple[Ranges, ...]:
    """The shards of a sequence, even in tokens and in scores (see `fill`).

    Of the tolerances the largest counts that comes out even, since it cuts the fewest segments.

    Args:
        load: of the whole sequence. segments: the same, the densest first.
    """
    best, least = (), inf
    for tolerated in EXCESSES:
        shards = fill(num_ranks, segments, tolerated)
        uneven = load.unevenness(shards)
        if uneven < least:
            best, least = shards, uneven
        if least <= MAX_EXCESS:
            break
    return best


def fill(num_ranks: int, segments: Sequence[Segment], tolerated: float) -> tuple[Ranges, ...]:
    """Rank after rank gets its part of the densest and of the thinnest segments that are left.

    Dense ones have more scores for their tokens than the mean, thin ones fewer: of both ends
    together there is always an amount with as many tokens as the mean and as many scores.

    Args:
        segments: the densest first.
        tolerated: how far a rank may be off the mean of what is left, to cut fewer segments.
    """
    line = _Line(segments)
    shards = list[Ranges]()
    first, last = 0, line.tokens
    for ranks in range(num_ranks, 0, -1):
        mean = (last - first) / ranks, line.scores(first, last) / ranks
        front, back = line.ends(first, last, mean, tolerated) if ranks > 1 else (last - first, 0)
        shards.append(join((*line.rows(first, first + front), *line.rows(last - back, last))))
        first, last = first + front, last - back
    return tuple(shards)


class _Line:
    """The segments in a row, each as in `Segment.rows`: a place is a count of tokens."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.edges = list(accumulate((one.length for one in segments), initial=0))
        self.done = list(accumulate((one.area for one in segments), initial=0))
        self.tokens = self.edges[-1]

    def rows(self, start: int, stop: int) -> Iterator[Range]:
        """The rows between two places."""
        for at in range(self._at(start), len(self.segments)):
            edge, upto = self.edges[at : at + 2]
            if edge >= stop:
                return
            yield from self.segments[at].rows(max(start, edge) - edge, min(stop, upto) - edge)

    def scores(self, start: int, stop: int) -> float:
        """Of the rows between two places."""
        return self._before(stop) - self._before(start)

    def ends(
        self, first: int, last: int, mean: tuple[float, float], tolerated: float
    ) -> tuple[int, int]:
        """(tokens from the front, tokens from the back) with the mean's tokens and scores, nearly.

        Of all that are near enough those that cut the fewest segments.
        """
        tokens, scores = mean
        whole = round(tokens)

        def scores_with(front: int) -> float:
            return self.scores(first, first + front) + self.scores(last - whole + front, last)

        low = bisect_left(range(whole), scores, key=scores_with)
        best = (2, 0.0), (low, whole - low)
        nearby = self._nearby(first + low), self._nearby(last - whole + low)
        for upto, since in product(*nearby):
            if not first <= upto <= since <= last:
                continue
            got = upto - first + last - since, self.scores(first, upto) + self.scores(since, last)
            off = max(abs(have / want - 1) for have, want in zip(got, mean, strict=True) if want)
            cuts = (upto not in nearby[0][1:]) + (since not in nearby[1][1:])
            if off <= tolerated:
                best = min(best, ((cuts, off), (upto - first, last - since)))
        return best[1]

    def _nearby(self, place: int) -> tuple[int, int, int]:
        """The place itself, and the edges of segments before and behind it."""
        at = self._at(place)
        return place, self.edges[at], self.edges[min(at + 1, len(self.edges) - 1)]

    def _at(self, place: int) -> int:
        """The segment at a place."""
        return min(bisect_right(self.edges, place), len(self.segments)) - 1

    def _before(self, place: int) -> float:
        at = self._at(place)
        return self.done[at] + (place - self.edges[at]) * self.segments[at].density
