"""Rows that ranks need of each other: those just before their own, or all rows.

Shapes: b batch, s rows of this rank, n rows that it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from wf_backends.comm import NO_PASS, Communicator
from wf_backends.lowering import parcels
from wf_backends.runtime import Messages, add, gather_shards, linear_map, scatter
from wf_backends.schedule import Layout, intersect, join, size


@lru_cache(maxsize=64)
def with_earlier_rows(layout: Layout, count: int, borders: tuple[int, ...]) -> Layout:
    """By rank: its rows, and the `count` rows before each of its ranges, in the same document."""
    return tuple(
        join((max(start - count, _first_of(start, borders)), stop) for start, stop in shard)
        for shard in layout
    )


def gather_needed(
    comm: Communicator, layout: Layout, needed: Layout | None, x: Tensor, label: str
) -> Tensor:
    """This rank's rows (b, s, ...) -> the rows that it needs (b, n, ...), in sequence order.

    The gradient of a row is summed over the ranks that needed it, in float32 or wider.

    Args:
        layout, needed: by rank, the positions that it has and that it needs; None = all.
    """
    needed = needed or (join(piece for shard in layout for piece in shard),) * len(layout)
    forward = partial(_gather, comm, layout, needed)
    return linear_map(x, forward, partial(_sum_back, comm, layout, needed), label)


def _gather(comm: Communicator, layout: Layout, needed: Layout, x: Tensor, label: str) -> Tensor:
    comm.enter(NO_PASS)
    return gather_shards(comm, layout, 1, x, label, needed)


def _sum_back(comm: Communicator, layout: Layout, needed: Layout, x: Tensor, label: str) -> Tensor:
    """The transpose of `_gather`."""
    comm.enter(NO_PASS.backward())
    messages, me, buffer = Messages(comm, label), comm.rank, x.transpose(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = buffer.new_zeros((size(layout[me]), *buffer.shape[1:]), dtype=wide)
    put = partial(scatter, (total,), add)
    for peer in range(comm.size):
        messages.send(parcels(peer, intersect(layout[peer], needed[me]), needed[me]), (buffer,))
        messages.collect(
            parcels(peer, intersect(layout[me], needed[peer]), layout[me]), (buffer,), put
        )
    messages.post().wait()
    return total.transpose(0, 1).to(x.dtype)


def _first_of(position: int, borders: Sequence[int]) -> int:
    """The first position of the document that holds a position."""
    return borders[bisect_right(borders, position) - 1]
