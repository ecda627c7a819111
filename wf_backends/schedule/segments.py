"""What the queries of a sequence have to compute under a mask in slices.

Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

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
