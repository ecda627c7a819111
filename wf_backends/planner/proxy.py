"""What is planned for in place of a request under a window, in packed documents or with slices.

Closed forms count what a full mask sends, so messages are counted here, on few routes. Hosts that
are far apart exchange nothing: a part of them, with its share of the tokens, stands for all.

Packed documents are replaced by typical ones, drawn with the same mean length, so that a training
run needs few plans. Documents of equal length would be a bad choice: they fit their ranks too well,
so that no route seems to send anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import exp
from random import Random
from statistics import NormalDist

from wf_backends.cost import Workload
from wf_backends.lowering import slice_area
from wf_backends.planner.head_splits import legal_degrees
from wf_backends.planner.plan import EXACT_UP_TO, Request
from wf_backends.schedule import LAYOUTS, Mask, Placed, Range

SPARSE_EXACT_UP_TO = 64  # ranks up to which every message is counted under such a mask
MIN_PART_RANKS = 2 * EXACT_UP_TO  # of a part that stands for all ranks
MIN_PART_WINDOWS = 16  # that fit into the tokens of a part
DOCUMENT_LENGTHS = tuple(round(10 * exp(NormalDist().inv_cdf((i + 0.5) / 32))) for i in range(32))
"""Quantiles of a log-normal distribution with sigma = 1, in tenths of its median: 1 to 86."""
GRID_CELLS = 32  # of a sequence; slices are taken to begin and end at their borders
MAX_GRID_ERROR = 0.05
"""Share of the pairs that slices let through; if the grid changes more, slices stay as they are."""
MIN_HALVINGS = 2
"""Halvings of the sequence down to the documents' mean length: with fewer it matters where each
document begins."""
MIN_PART_HALVINGS = 3
"""The same of a part's tokens: with fewer it says too little, since few routes are looked at."""
SEED = 3
"""Of the drawn documents: the one of eight with few bad plans; benchmarks/kinds.py tries others."""
MAX_DOCUMENTS_PER_SHARD = 8
"""Shorter documents are planned for as this short: they hardly ever leave their rank."""
PLAIN_ROUTES = tuple(Placed((("name", name),), (0,)) for name in ("ring", "all_gather"))
"""Routes that send only rows that are read, whatever their size."""


def representative(request: Request) -> Request:
    """The request that is planned for in place of a call, and of all similar calls.

    Lengths are rounded up to one of eight an octave, documents are replaced by typical ones, slices
    begin and end on a grid. Where tokens see only near tokens, a part of the ranks stands for all.
    """
    workload, seqlen, keys = request.workload, request.workload.seqlen, request.workload.keys
    if workload.mask.slices is not None:
        return replace(request, workload=_on_grid(workload))
    keys = None if keys in (None, seqlen) else _rounded_length(keys)
    workload = replace(workload, seqlen=_rounded_length(seqlen), keys=keys)
    rounded = replace(request, workload=workload)
    return on_fewer_ranks(rounded) or with_typical_documents(rounded)


def _on_grid(workload: Workload) -> Workload:
    """The workload with the ends of its slices on a grid, if about as many pairs are then seen:
    prefixes whose length changes from batch to batch are planned for once."""
    moved = [
        s._replace(q=_on_cells(s.q, workload.seqlen), k=_on_cells(s.k, workload.num_keys))
        for s in workload.mask.slices or ()
    ]
    slices = tuple(filter(slice_area, moved))  # without those that see nothing now
    coarse = replace(workload, mask=Mask(slices=slices))
    error = abs(coarse.scores - workload.scores)
    return coarse if slices and error <= MAX_GRID_ERROR * workload.scores else workload


def _on_cells(ends: Range, length: int) -> Range:
    """The borders of grid cells that are nearest to the ends of a range."""
    cells = ((GRID_CELLS * end + length // 2) // length for end in ends)
    start, stop = (cell * length // GRID_CELLS for cell in cells)
    return start, stop


def _rounded_length(seqlen: int) -> int:
    """The next of 8 lengths an octave: lengths that differ little are planned as one."""
    step = 1 << max(0, seqlen.bit_length() - 4)
    return -(-seqlen // step) * step


def with_message_counts(request: Request) -> Request:
    """The request on few routes, every message counted, if closed forms know little of its mask."""
    size, is_dense = request.topology.size, request.workload.mask.is_dense
    can_be_counted = request.exact_up_to < size <= SPARSE_EXACT_UP_TO
    return on_few_routes(request) if can_be_counted and not is_dense else request


def on_few_routes(request: Request) -> Request:
    """The request with every message counted; PLAIN_ROUTES where it names no route, and on several
    hosts an all-gather whose rows cross to a host once."""
    topology, plain = request.topology, PLAIN_ROUTES
    if topology.hosts > 1 and topology.ranks_per_host > 1:
        plain += (replace(PLAIN_ROUTES[1], host_size=topology.ranks_per_host),)
    forward, backward = request.forward or plain, request.backward or plain
    return replace(request, exact_up_to=SPARSE_EXACT_UP_TO, forward=forward, backward=backward)


def with_documents(workload: Workload, cu_seqlens: tuple[int, ...] | None) -> Workload:
    """The workload with these documents; None = one, on shards that are as even without any."""
    layout, kind = workload.layout, LAYOUTS[workload.layout]
    if cu_seqlens is None and (kind.needs_documents or kind.needs_slices):
        layout = "zigzag"
    return replace(workload, mask=Mask(workload.mask.band, cu_seqlens), layout=layout)


def with_typical_documents(request: Request) -> Request:
    """The request with typical documents in place of its own, or with one if none are typical."""
    workload, size = request.workload, request.topology.size
    documents = workload.mask.cu_seqlens if size <= SPARSE_EXACT_UP_TO else None
    if documents is not None:
        documents = typical_documents(documents, workload.seqlen, size)
    return replace(request, workload=with_documents(workload, documents))


def on_fewer_ranks(request: Request) -> Request | None:
    """The request on a part of its hosts, whose fastest plan is one for all of them.

    With documents the part is as large as can be counted, since the longest documents decide. With
    a window it is small, twice as large where readers of a row are in either direction.

    Returns:
        None if no part of the hosts holds several windows or documents, or if a part cannot have
        the route or head split that the request names.
    """
    workload, topology = request.workload, request.topology
    has_documents = workload.mask.cu_seqlens is not None
    # routes and head splits that exist for any number of ranks
    fits_parts = {*(request.forward or ()), *(request.backward or ())} <= {*PLAIN_ROUTES}
    fits_parts = fits_parts and {request.strides, request.chunks} <= {None, (1,)}
    if not workload.mask.is_near or workload.keys is not None or not fits_parts:
        return None
    if has_documents and topology.size <= SPARSE_EXACT_UP_TO:
        return None
    unit = 1 if topology.hosts == 1 else topology.ranks_per_host
    one_direction = has_documents or workload.layout == "contiguous"
    min_ranks = MIN_PART_RANKS if one_direction else 2 * MIN_PART_RANKS
    smallest = unit * max(2, -(-min_ranks // unit))
    sizes = range(smallest, min(SPARSE_EXACT_UP_TO, topology.size - 1) + 1, unit)
    for size in reversed(sizes) if has_documents else sizes:
        if part := _part(request, size):
            return part
    return None


def _part(request: Request, size: int) -> Request | None:
    """The request on `size` of its ranks, with their share of the tokens, if that says enough."""
    workload, topology = request.workload, request.topology
    seqlen = workload.seqlen * size // topology.size
    documents, band = workload.mask.cu_seqlens, workload.mask.band
    if documents is not None:
        documents = typical_documents(documents, seqlen, size, MIN_PART_HALVINGS)
    if documents is None and max(band.left, band.right) * MIN_PART_WINDOWS > seqlen:
        return None
    share = with_documents(replace(workload, seqlen=seqlen), documents)
    part = replace(request, topology=topology.with_ranks(size), workload=share)
    part = on_few_routes(part)
    # degrees that all ranks allow too, and that leave the route at least two ranks
    degrees = [d for d in legal_degrees(part) if topology.size % d == 0 and 2 * d <= size]
    return replace(part, degrees=tuple(degrees)) if degrees else None


def typical_documents(
    cu_seqlens: tuple[int, ...], seqlen: int, size: int, min_halvings: int = MIN_HALVINGS
) -> tuple[int, ...] | None:
    """Borders of drawn documents whose mean length, as tokens see it, is that of the given ones.

    The mean is rounded to seqlen / a power of two.

    Args:
        cu_seqlens: the borders of the real documents.
        seqlen: where the result ends, which need not be where the real documents end.
        size: the number of ranks. min_halvings: see MIN_HALVINGS.

    Returns:
        None where so few of these documents fill the sequence that none are typical.
    """
    squares = sum((stop - start) ** 2 for start, stop in pairwise(cu_seqlens))
    squared_ratio = (seqlen * cu_seqlens[-1]) ** 2 // squares**2  # (seqlen / mean)**2
    halvings = squared_ratio.bit_length() // 2  # log2(seqlen / mean), rounded
    if halvings < min_halvings:
        return None
    max_halvings = (MAX_DOCUMENTS_PER_SHARD * size).bit_length() - 1
    return draw_documents(seqlen, min(halvings, max_halvings))


@lru_cache(maxsize=16)
def draw_documents(seqlen: int, halvings: int) -> tuple[int, ...]:
    """Borders of documents whose mean length, as tokens see it, is seqlen / 2**halvings."""
    generator, ends, total, squares = Random(SEED), list[int](), 0, 0
    while total**2 <= squares << halvings:
        length = DOCUMENT_LENGTHS[int(generator.random() * len(DOCUMENT_LENGTHS))]
        total, squares = total + length, squares + length**2
        ends.append(total)
    return tuple(sorted({0, *(seqlen * end // total for end in ends)}))
