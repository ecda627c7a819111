"""Shards that are filled one after the other, each with its share of the tokens and of the scores.

A score is a (query, key) pair that the mask lets through. A sequence is divided into segments in
which the number of keys that a query sees is linear in its position: packed documents, or what
`segments_of` finds for a mask in slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from wf_backends.schedule.ranges import Range, Ranges, join, size
from wf_backends.schedule.slices import Slice


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
        """The mean number of keys that a token sees."""
        return self.first + self.slope * (self.length - 1) / 2

    @property
    def area(self) -> int:
        """The scores of all tokens."""
        return self.scores(self.start, self.stop)

    def scores(self, start: int, stop: int) -> int:
        """The scores of those tokens in [start, stop) that lie in the segment."""
        begin, end, first, slope = self
        a, b = max(start, begin) - begin, min(stop, end) - begin
        return (b - a) * (2 * first + slope * (a + b - 1)) // 2 if a < b else 0

    def rows(self, start: int, stop: int) -> tuple[Range, ...]:
        """Tokens `start` to `stop` of an order in which n tokens have nearly n * density scores.

        If the number of keys rises or falls, this order goes from both ends inwards: a token and
        its mirror image together have 2 * density scores.
        """
        first, last = self.start, self.stop
        if not self.slope or stop - start == last - first:
            return ((first + start, first + stop),)
        head = first + (start + 1) // 2, first + (stop + 1) // 2
        return head, (last - stop // 2, last - start // 2)


class Load:
    """The scores and tokens of shards, for segments in the order of the sequence."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]

    def scores(self, shard: Ranges) -> int:
        """The scores of the shard's queries."""
        scores = 0
        for start, stop in shard:
            index = bisect_right(self._starts, start) - 1
            while index < len(self.segments) and self.segments[index].start < stop:
                scores += self.segments[index].scores(start, stop)
                index += 1
        return scores

    def excess(self, shards: Sequence[Ranges]) -> float:
        """Largest load / mean load - 1, in scores or in tokens, whichever is larger."""
        loads = [self.scores(shard) for shard in shards], [size(shard) for shard in shards]
        return max(max(load) * len(load) / sum(load) - 1 for load in loads if any(load))


def causal_load(cu_seqlens: Sequence[int]) -> Load:
    """The load under a causal mask inside documents."""
    return Load([Segment(start, stop) for start, stop in pairwise(cu_seqlens)])


def slices_load(slices: Sequence[Slice], seqlen: int) -> Load:
    """The load under a mask in slices."""
    return Load(segments_of(slices, seqlen))


def segments_of(slices: Sequence[Slice], seqlen: int) -> list[Segment]:
    """The segments of a sequence, by the number of keys that queries see in all slices together.

    It is offset + slope * position in each segment; both are sums over the slices' segments.
    """
    offset_changes, slope_changes = Counter[int](), Counter[int]()  # by position
    for part in chain.from_iterable(map(_segments_of_slice, slices)):
        for position, sign in ((part.start, 1), (part.stop, -1)):
            offset_changes[position] += sign * (part.first - part.slope * part.start)
            slope_changes[position] += sign * part.slope
    edges = sorted({0, seqlen, *(position for position in offset_changes if position < seqlen)})
    segments, offset, slope = list[Segment](), 0, 0
    for start, stop in pairwise(edges):
        offset += offset_changes[start]
        slope += slope_changes[start]
        if offset_changes[start] or slope_changes[start] or not segments:
            segments.append(Segment(start, stop, offset + slope * start, slope))
        else:  # where one slice ends, another goes on in the same way
            segments[-1] = segments[-1]._replace(stop=stop)
    return segments


def _segments_of_slice(slice_: Slice) -> Iterator[Segment]:
    """The segments of a slice's queries: the number of keys rises, stays, and falls."""
    (q0, q1), (k0, k1) = slice_.q, slice_.k

    def keys(query: int) -> int:
        return int(min(k1, query + slice_.right + 1) - max(k0, query - slice_.left))

    first = int(max(q0, k0 - slice_.right))  # the queries that see any key: [first, last)
    last = int(min(q1, k1 + slice_.left))
    bends = k1 - slice_.right, k0 + slice_.left + 1  # keys stop to rise, begin to fall
    edges = sorted({first, last, *(int(bend) for bend in bends if first < bend < last)})
    for start, stop in pairwise(edges):
        slope = keys(start + 1) - keys(start) if stop - start > 1 else 0
        yield Segment(start, stop, keys(start), slope)


def fill_evenly(num_ranks: int, segments: Sequence[Segment]) -> tuple[Ranges, ...]:
    """Shards that are even in tokens and in scores, for the segments of a sequence, densest first.

    Dense segments have more scores for their tokens than the mean, sparse ones fewer. So some
    amounts from both ends together have the mean number of tokens and the mean number of scores:
    rank after rank gets such amounts of what is left.
    """
    line = _Line(segments)
    shards = list[Ranges]()
    first, last = 0, line.edges[-1]
    for ranks_left in range(num_ranks, 0, -1):
        count = round((last - first) / ranks_left)
        front = line.front(first, last, count, line.scores(first, last) / ranks_left)
        back = front + last - first - count
        shards.append(join((*line.rows(first, front), *line.rows(back, last))))
        first, last = front, back
    return tuple(shards)


class _Line:
    """Segments end to end, each as in `Segment.rows`. A point is the number of tokens before it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.edges = list(accumulate((segment.length for segment in segments), initial=0))
        self.scores_before = list(accumulate((segment.area for segment in segments), initial=0))

    def rows(self, start: int, stop: int) -> Iterator[Range]:
        """The rows between two points."""
        for index in range(self._segment_at(start), len(self.segments)):
            begin, end = self.edges[index : index + 2]
            if begin >= stop:
                return
            yield from self.segments[index].rows(max(start, begin) - begin, min(stop, end) - begin)

    def scores(self, start: int, stop: int) -> float:
        """The scores of the rows between two points."""
        return self._scores_until(stop) - self._scores_until(start)

    def front(self, first: int, last: int, count: int, scores: float) -> int:
        """The point up to which `count` tokens of [first, last) are taken from the front, the
        others from the back, so that they have these scores."""

        def scores_with(in_front: int) -> float:
            back = last - count + in_front
            return self.scores(first, first + in_front) + self.scores(back, last)

        return first + bisect_left(range(count), scores, key=scores_with)

    def _segment_at(self, point: int) -> int:
        return min(bisect_right(self.edges, point), len(self.segments)) - 1

    def _scores_until(self, point: int) -> float:
        index = self._segment_at(point)
        tokens = point - self.edges[index]
        return self.scores_before[index] + tokens * self.segments[index].density
