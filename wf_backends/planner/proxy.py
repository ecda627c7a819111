"""What is planned for where tokens see only some: under a window, in packed documents or slices.

Closed forms count what a full mask sends, so messages are counted, of few routes. Hosts that are
far apart have nothing to do with each other: some, with their share of the tokens, stand for all.

Packed documents are planned for by their kind, of which a training run meets a few: drawn ones with
the same mean length. Documents of one length would be a bad kind: they fit their ranks too well, so
that no route seems to send anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from random import Random

from wf_backends.cost import Workload
from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import EXACT_UP_TO, Request
from wf_backends.schedule import LAYOUTS, Mask, Placed, Range

NEAR_UP_TO = 64  # ranks up to which every message is counted
FEW_RANKS = 2 * EXACT_UP_TO  # that stand for others, at least
WINDOWS = 16  # that fit into the tokens of those ranks, at least
LENGTHS = (
    *(1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8, 9, 10, 10, 11, 12, 13, 14, 16),
    *(17, 19, 21, 23, 26, 29, 34, 41, 53, 86),
)
"""Quantiles of a log-normal distribution with sigma = 1, in tenths of its median."""
GRID = 32  # parts of a sequence, at whose ends slices are taken to begin and end
GRID_ERROR = 0.05
"""Of all pairs that slices let through; where they change by more, slices are taken as they are."""
MIN_HALVINGS = 2
"""Halvings of the sequence down to the documents' mean length: with fewer it matters where each
document begins."""
FEWEST_IN_A_PART = 3
"""The same of a part's tokens: fewer say too little, since only some routes are looked at."""
SEED = 3
"""Which draw: picked once, of eight, for few bad plans; benchmarks/kinds.py judges it on others."""
MAX_PARTS_OF_A_SHARD = 8
"""Parts of a shard, down to which lengths tell kinds apart: shorter documents hardly ever leave
their rank."""
PLAIN = tuple(Placed((("name", name),), (0,)) for name in ("ring", "all_gather"))
"""Routes that send nothing but what is read, whatever their size."""


def alike(request: Request) -> Request:
    """The request that is planned for in place of a call, and of all calls that are like it.

    Lengths count to the next of eight an octave, documents by their kind; and some ranks stand for
    all of them where tokens see only near ones. Slices begin and end on a grid.
    """
    work = request.workload
    if work.mask.slices is not None:
        return replace(request, workload=_on_grid(work))
    keys = None if work.keys in (None, work.seqlen) else _similar(work.keys)
    like = replace(request, workload=replace(work, seqlen=_similar(work.seqlen), keys=keys))
    return on_fewer_ranks(like) or of_its_kind(like)


def _on_grid(work: Workload) -> Workload:
    """The workload with its slices' ends on a grid, if they then hold about as many pairs: prefixes
    whose length changes from batch to batch are planned for once."""
    found = [
        one._replace(q=_near(one.q, work.seqlen), k=_near(one.k, work.num_keys))
        for one in work.mask.slices or ()
    ]
    slices = tuple(one for one in found if one.distances[0] <= one.distances[1])
    coarse = replace(work, mask=Mask(slices=slices))
    is_like = abs(coarse.scores - work.scores) <= GRID_ERROR * work.scores
    return coarse if slices and is_like else work


def _near(ends: Range, length: int) -> Range:
    """The points of the grid that are nearest to the ends of a range."""
    start, stop = ((GRID * at + length // 2) // length * length // GRID for at in ends)
    return start, stop


def _similar(seqlen: int) -> int:
    """The next of 8 lengths an octave: lengths that differ little are planned as one."""
    step = 1 << max(0, seqlen.bit_length() - 4)
    return -(-seqlen // step) * step


def counted(request: Request) -> Request:
    """The request, its messages counted one by one where closed forms know little of its mask."""
    size, is_dense = request.topology.size, request.workload.mask.is_dense
    between = request.exact_up_to < size <= NEAR_UP_TO
    return on_few(request) if between and not is_dense else request


def on_few(request: Request) -> Request:
    """The request on few routes, of which every message is counted; all-gather also with rows that
    cross to a host once."""
    at, few = request.topology, PLAIN
    if at.hosts > 1 and at.ranks_per_host > 1:
        few += (replace(PLAIN[1], host_size=at.ranks_per_host),)
    routes = {"forward": request.forward or few, "backward": request.backward or few}
    return replace(request, exact_up_to=NEAR_UP_TO, **routes)


def packed(work: Workload, borders: tuple[int, ...] | None) -> Workload:
    """The workload with these documents; None = one, on shards that are as even without any."""
    layout, kind = work.layout, LAYOUTS[work.layout]
    if borders is None and (kind.needs_documents or kind.needs_slices):
        layout = "zigzag"
    return replace(work, mask=Mask(work.mask.band, borders), layout=layout)


def of_its_kind(request: Request) -> Request:
    """The request with typical documents in place of its own, or as one where none are typical."""
    work, size = request.workload, request.topology.size
    borders = work.mask.cu_seqlens if size <= NEAR_UP_TO else None
    kind = borders and typical_documents(borders, work.seqlen, size)
    return replace(request, workload=packed(work, kind))


def on_fewer_ranks(request: Request) -> Request | None:
    """The request on some of its hosts, whose fastest plan is one for all of them.

    For documents on as many ranks as may be counted: how far the longest reach tells. For a window
    few do, twice as many where its readers are in either direction.

    Returns:
        None if no part of the hosts holds several windows or documents, or if a route or a head
        split is wanted that a part does not have.
    """
    work, at = request.workload, request.topology
    has_documents = work.mask.cu_seqlens is not None
    routes = {*(request.forward or PLAIN), *(request.backward or PLAIN)}
    plain = routes <= {*PLAIN} and {request.strides, request.chunks} <= {None, (1,)}
    if not work.mask.is_near or work.keys is not None or not plain:
        return None
    if has_documents and at.size <= NEAR_UP_TO:
        return None
    unit = 1 if at.hosts == 1 else at.ranks_per_host
    few = FEW_RANKS if has_documents or work.layout == "contiguous" else 2 * FEW_RANKS
    least = unit * max(2, -(-few // unit))
    sizes = range(least, min(NEAR_UP_TO, at.size - 1) + 1, unit)
    parts = (_part(request, size) for size in (sizes[::-1] if has_documents else sizes))
    return next(filter(None, parts), None)


def _part(request: Request, size: int) -> Request | None:
    """The request on `size` of its ranks, with their share of the tokens."""
    work, topology = request.workload, request.topology
    seqlen = work.seqlen * size // topology.size
    borders, band = work.mask.cu_seqlens, work.mask.band
    kind = borders and typical_documents(borders, seqlen, size, FEWEST_IN_A_PART)
    if kind is None and max(band.left, band.right) * WINDOWS > seqlen:
        return None
    share = packed(replace(work, seqlen=seqlen), kind)
    part = on_few(replace(request, topology=topology.with_ranks(size), workload=share))
    fits = (d for d in legal_degrees(part) if topology.size % d == 0)
    degrees = tuple(d for d in fits if 2 * d <= size)  # some ranks are left for the route
    return replace(part, degrees=degrees) if degrees else None


def typical_documents(
    cu_seqlens: tuple[int, ...], seqlen: int, size: int, fewest: int = MIN_HALVINGS
) -> tuple[int, ...] | None:
    """Borders of documents drawn so that their mean length, as tokens see it, is the given ones'.

    Lengths count to the next power of two.

    Args:
        cu_seqlens: the borders of the real documents. seqlen: where the result ends, which need
            not be where the real ones do. size: the ranks. fewest: see MIN_HALVINGS.

    Returns:
        None where so few of these documents fill the sequence that no others stand for them.
    """
    squares = sum((stop - start) ** 2 for start, stop in pairwise(cu_seqlens))
    times = (seqlen * cu_seqlens[-1]) ** 2 // squares**2  # (seqlen / mean)**2
    halvings = times.bit_length() // 2  # log2(seqlen / mean), rounded
    if halvings < fewest:
        return None
    return draw_documents(seqlen, min(halvings, (MAX_PARTS_OF_A_SHARD * size).bit_length() - 1))


@lru_cache(maxsize=16)
def draw_documents(seqlen: int, halvings: int) -> tuple[int, ...]:
    """Borders of documents whose mean length, as tokens see it, is seqlen / 2**halvings."""
    draw, ends, whole, squares = Random(SEED), list[int](), 0, 0
    while whole**2 <= squares << halvings:
        length = LENGTHS[int(draw.random() * len(LENGTHS))]
        whole, squares = whole + length, squares + length**2
        ends.append(whole)
    return tuple(sorted({0, *(seqlen * end // whole for end in ends)}))
