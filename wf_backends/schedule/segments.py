"""What the queries of a sequence have to compute under a mask in slices.

Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from wf_backends.schedule.filling import Load, Segment
from wf_backends.schedule.slices import Slice


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
        here = Segment(start, stop, base + rise * start, rise)
        found[-1:] = _joined(found[-1], here) if found else [here]
    return found


def _joined(before: Segment, here: Segment) -> list[Segment]:
    """Both as one segment, if the one goes on as the other."""
    slope = before.slope if before.length > 1 else here.first - before.first
    follows = here.length == 1 or here.slope == slope
    if follows and here.first == before.first + slope * before.length:
        return [Segment(before.start, here.stop, before.first, slope)]
    return [before, here]


def _pieces(one: Slice) -> Iterator[Segment]:
    """The queries of a slice in segments: keys rise, stay or fall from one to the next."""
    (q0, q1), (k0, k1) = one.q, one.k

    def keys(query: int) -> int:
        return int(min(k1, query + one.right + 1) - max(k0, query - one.left))

    turns = (k0 - one.right, k1 - one.right, k0 + one.left, k1 + one.left)
    near = (int(at) + by for at in turns if at not in (inf, -inf) for by in (-1, 0, 1))
    edges = sorted({q0, q1, *(at for at in near if q0 < at < q1)})
    for start, stop in pairwise(edges):
        if keys(start) > 0:
            slope = keys(start + 1) - keys(start) if stop - start > 1 else 0
            yield Segment(start, stop, keys(start), slope)
