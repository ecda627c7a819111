"""Which rows of text and image tokens a rank has, where attention joins them to one sequence.

The joined sequence is cut by the layout, so that every rank has as many rows as attention expects,
whatever the lengths. A rank may have no text at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from wf_backends import SequenceParallel
from wf_backends.runtime import gather_shards, move, positions, take_shard
from wf_backends.schedule import Layout, intersect, make_layout


def cut_streams(sp: SequenceParallel, lengths: Sequence[int]) -> list[Layout]:
    """For each stream the rows of every rank, counted inside the stream.

    Args:
        lengths: of the streams, in tokens, in the order in which attention joins them.

    Raises:
        ValueError: if there are too few tokens, or the layout follows from documents.
    """
    joined = make_layout(sp.config.layout, sp.size, sum(lengths))
    spans = pairwise(accumulate(lengths, initial=0))
    return [
        tuple(
            tuple((a - start, b - start) for a, b in intersect(shard, ((start, stop),)))
            for shard in joined
        )
        for start, stop in spans
    ]


def take(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """This rank's rows of a whole x. A gradient stays in its rows, between zeros."""
    mine = layout[sp.rank]
    index = positions(mine, x.device) if mine else torch.empty(0, dtype=torch.long, device=x.device)
    return x.index_select(dim, index)


def whole(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """All rows, on every rank. The gradient of this rank's rows counts `size` times.

    The mean over the ranks of the gradients of any parameter, before, between and after the cut, is
    then that of one device, where every rank makes the same loss.
    """

    def back(grad: Tensor, label: str) -> Tensor:
        return take_shard(sp.comm, layout, dim, grad, label) * sp.size

    return move(x, partial(gather_shards, sp.comm, layout, dim), back, "sample")
