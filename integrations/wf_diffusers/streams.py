"""Which rows of text and image tokens a rank has, where attention joins them to one sequence.

Every token attends to every token, so that it does not matter which ones a rank has: it gets as
many as attention expects by the layout, and of text and image its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from wf_backends import SequenceParallel
from wf_backends.runtime import gather_shards, move, positions, take_shard
from wf_backends.schedule import Layout, Ranges, make_layout, size


def cut_streams(sp: SequenceParallel, lengths: Sequence[int]) -> list[Layout]:
    """For each stream the rows of every rank, counted inside the stream.

    Of n1 tokens of text and n2 of an image, the first c of both together are
    floor(c n1 / (n1 + n2)) of text and the rest of the image.

    Args:
        lengths: of one stream or two, in tokens.

    Raises:
        ValueError: if there are too few tokens, or the layout follows from documents.
    """
    total = sum(lengths)
    rows = map(size, make_layout(sp.config.layout, sp.size, total))
    ends = [(end * lengths[0] // total, end) for end in accumulate(rows, initial=0)]
    first = tuple(_range(a, b) for (a, _), (b, _) in pairwise(ends))
    second = tuple(_range(c - a, d - b) for (a, c), (b, d) in pairwise(ends))
    return [first, second][: len(lengths)]


def _range(start: int, stop: int) -> Ranges:
    return ((start, stop),) if start < stop else ()


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
