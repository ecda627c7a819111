"""Shards that are filled one after the other, each with its share of the tokens and of the scores.

A score is a (query, key) pair that the mask lets through. A sequence is divided into segments in
which the number of keys that a query sees is linear in its position: packed documents, or what
`segments_of` finds for a mask in slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from math import inf
from typing import NamedTuple

from wf_backends.schedule.ranges import Range, Ranges, join, size
from wf_backends.schedule.slices import Slice

MAX_EXCESS = 0.02
"""The busiest rank may have this share more than the mean, so that fewer segments are cut."""
TOLERANCES = (MAX_EXCESS, MAX_EXCESS / 2, MAX_EXCESS / 4, 0.0)  # tried in this order


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


def count_scores(shard: Ranges, segments: Sequence[Segment]) -> int:
    """The scores of a shard's queries, for segments in the order of the sequence."""
    scores = 0
    for start, stop in shard:
        index = bisect_right(segments, (start, inf)) - 1
        while index < len(segments) and segments[index].start < stop:
            scores += segments[index].scores(start, stop)
            index += 1
    return scores


def excess(shards: Sequence[Ranges], segments: Sequence[Segment]) -> float:
    """Largest load / mean load - 1, in scores or in tokens, whichever is larger."""
    loads = [count_scores(shard, segments) for shard in shards], [size(shard) for shard in shards]
    return max(max(load) * len(load) / sum(load) - 1 for load in loads if any(load))


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
    """The shards of a sequence, even in tokens and in scores (see `fill`).

    Tolerances are tried from the largest, which cuts the fewest segments, until shards are even.
    """
    densest_first = sorted(segments, key=lambda segment: (-segment.density, segment.start))
    best, best_excess = (), inf
    for tolerance in TOLERANCES:
        shards = fill(num_ranks, densest_first, tolerance)
        new_excess = excess(shards, segments)
        if new_excess < best_excess:
            best, best_excess = shards, new_excess
        if best_excess <= MAX_EXCESS:
            break
    return best


def fill(num_ranks: int, segments: Sequence[Segment], tolerance: float) -> tuple[Ranges, ...]:
    """Fill rank after rank from the densest and from the sparsest segments that are left.

    Dense segments have more scores for their tokens than the mean, sparse ones fewer. So some
    amounts from both ends together have the mean number of tokens and the mean number of scores.

    Args:
        segments: the densest first.
        tolerance: a rank may be off the mean of what is left by this share, to cut fewer segments.
    """
    line = _Line(segments)
    shards = list[Ranges]()
    first, last = 0, line.num_tokens
    for ranks_left in range(num_ranks, 0, -1):
        means = (last - first) / ranks_left, line.scores(first, last) / ranks_left
        front, back = last, last
        if ranks_left > 1:
            front, back = line.cut_ends(first, last, means, tolerance)
        shards.append(join((*line.rows(first, front), *line.rows(back, last))))
        first, last = front, back
    return tuple(shards)


class _Line:
    """Segments end to end, each as in `Segment.rows`. A point is the number of tokens before it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.edges = list(accumulate((segment.length for segment in segments), initial=0))
        self.scores_before = list(accumulate((segment.area for segment in segments), initial=0))
        self.num_tokens = self.edges[-1]

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

    def cut_ends(
        self, first: int, last: int, means: tuple[float, float], tolerance: float
    ) -> tuple[int, int]:
        """Points (front, back): [first, front) and [back, last) together have the mean (tokens,
        scores), within the tolerance. Of all such points, those that cut the fewest segments.
        """
        count = round(means[0])

        def scores_with(in_front: int) -> float:
            front, back = first + in_front, last - count + in_front
            return self.scores(first, front) + self.scores(back, last)

        in_front = bisect_left(range(count), means[1], key=scores_with)
        best = (2, 0.0), (in_front, count - in_front)  # (cuts, deviation), tokens at both ends
        fronts = self._with_edges(first + in_front)
        backs = self._with_edges(last - count + in_front)
        for front, back in product(fronts, backs):
            if not first <= front <= back <= last:
                continue
            tokens = front - first, last - back
            sums = sum(tokens), self.scores(first, front) + self.scores(back, last)
            pairs = zip(sums, means, strict=True)
            deviation = max(abs(value / mean - 1) for value, mean in pairs if mean)
            cuts = int(front not in fronts[1:]) + int(back not in backs[1:])
            if deviation <= tolerance:
                best = min(best, ((cuts, deviation), tokens))
        return first + best[1][0], last - best[1][1]

    def _with_edges(self, point: int) -> tuple[int, int, int]:
        """The point, and the edges of the segment that it lies in."""
        index = self._segment_at(point)
        return point, self.edges[index], self.edges[index + 1]

    def _segment_at(self, point: int) -> int:
        return min(bisect_right(self.edges, point), len(self.segments)) - 1

    def _scores_until(self, point: int) -> float:
        index = self._segment_at(point)
        tokens = point - self.edges[index]
        return self.scores_before[index] + tokens * self.segments[index].density
