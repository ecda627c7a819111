"""Dynamic sequence parallelism (DSP): the sharded dimension changes between stages.

A hidden state with several sequence dimensions (frames, positions in a frame) is sharded along one
of them. A stage that mixes another dimension needs no communication. Before a stage that mixes the
sharded dimension, one all-to-all shards another dimension instead. Shards are the chunks of the
contiguous layout. A shard may be empty; empty messages are not sent.

Source: arXiv 2403.10266.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Size, Tensor

from wf_backends._compile import eager
from wf_backends._validation import one_of
from wf_backends.comm import Communicator, ConsistencyCheck, all_to_all, fingerprint, make_comm
from wf_backends.runtime import dimension, gather_shards, linear_map, take_shard
from wf_backends.schedule import Layout

Sizes = tuple[int, ...]  # rows of a dimension that each rank holds


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's shard of a tensor that is cut along `dim`; rank r holds `sizes[r]` rows."""

    tensor: Tensor
    dim: int
    sizes: Sizes


class DynamicSequenceParallel:
    """Split, switch and gather tensors over one group of ranks.

    Each takes the `name` of the layer that calls it, if any: ranks that call from different layers
    get an error that names them.

    Args:
        group: None (the default group), a torch ProcessGroup, an mpi4py communicator, or one of
            our communicators, such as `SequenceParallel(...).comm`.
        gradients: the meaning of the gradient of a tensor that every rank holds whole.
            "whole": every rank gets the gradient of one device; a loss that all ranks compute from
            a gathered tensor counts once, not once for each rank. The caller must sum the gradients
            of parameters that work on shards over the ranks, and no others.
            "averaged": the mean over the ranks is the gradient of one device, for all parameters:
            before, between and after the cuts, as data parallelism averages them. A split then
            sends nothing in the backward either.

    Raises:
        ValueError: if `gradients` is neither.
    """

    def __init__(self, group: Any = None, gradients: str = "whole") -> None:
        one_of("gradients", gradients, ("whole", "averaged"))
        self.comm, self.gradients = make_comm(group), gradients
        self.rank, self.size = self.comm.rank, self.comm.size
        self._consistency = ConsistencyCheck(self.comm)

    @eager
    def split(self, x: Tensor, dim: int, name: str | None = None) -> Sharded:
        """This rank's chunk of a tensor that every rank holds whole. Nothing is sent.

        Its gradient is gathered ("whole"), or padded with zeros to the whole shape ("averaged").

        Raises:
            ValueError: if x has no such dimension, or its shape or dtype differs between ranks.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            dim = dimension(x, dim)
        dtype, shape = fingerprint(x.dtype), fingerprint(x.shape)
        same = {"dim": dim, "dtype": dtype, "shape": shape}
        self._consistency.check(same, {}, x, layer=name)
        sizes = chunk_sizes(x.shape[dim], self.size)
        to_whole = gather_shards if self.gradients == "whole" else _zero_padded
        cut = self.comm, ranges_of(sizes), dim
        forward, backward = partial(take_shard, *cut), partial(to_whole, *cut)
        return Sharded(linear_map(x, forward, backward, "split"), dim, sizes)

    @eager
    def switch(self, x: Sharded, from_dim: int, to_dim: int, name: str | None = None) -> Sharded:
        """Shard another dimension instead: one all-to-all in the forward, one in the backward.

        Each of them sends (P - 1) / P of a rank's shard.

        Raises:
            ValueError: if x is not sharded along from_dim, if to_dim equals from_dim or is no
                dimension of x, or if the ranks do not hold shards of one tensor.
        """
        with self._consistency:
            from_dim = self._check(x, from_dim, "from_dim", "switch")
            to_dim = dimension(x.tensor, to_dim, "to_dim")
            if to_dim == from_dim:
                raise ValueError(f"to_dim must differ from from_dim, got {to_dim} for both")
        self._check_same_shards(x, {"to_dim": to_dim}, name)
        sizes = chunk_sizes(x.tensor.shape[to_dim], self.size)
        old, new = (from_dim, x.sizes), (to_dim, sizes)
        forward = partial(_exchange, self.comm, old, new)
        backward = partial(_exchange, self.comm, new, old)
        return Sharded(linear_map(x.tensor, forward, backward, "switch"), to_dim, sizes)

    @eager
    def gather(self, x: Sharded, dim: int, name: str | None = None) -> Tensor:
        """The whole tensor on every rank, which all ranks use alike, as in a loss.

        Its gradient is cut; the backward sends nothing.

        Raises:
            ValueError: if x is not sharded along dim, or the ranks do not hold shards of one
                tensor.
        """
        with self._consistency:
            dim = self._check(x, dim, "dim", "gather")
        self._check_same_shards(x, {}, name)
        to_shard = take_shard if self.gradients == "whole" else _take_sum
        cut = self.comm, ranges_of(x.sizes), dim
        forward, backward = partial(gather_shards, *cut), partial(to_shard, *cut)
        return linear_map(x.tensor, forward, backward, "gather")

    @eager
    def gather_for_shards(self, x: Sharded, dim: int) -> Tensor:
        """The whole tensor on every rank, which each rank uses for its shard of another tensor.

        Such as a bias of attention whose rows are sharded. Its gradient is the sum over the ranks
        (a reduce-scatter): in the backward every rank sends what it received.

        Raises:
            ValueError: as `gather`.
        """
        with self._consistency:
            dim = self._check(x, dim, "dim", "gather")
        copies = Sharded(x.tensor.expand(self.size, *x.tensor.shape), dim + 1, x.sizes)
        return self.switch(copies, dim + 1, 0).tensor.squeeze(0)

    def _check(self, x: Sharded, dim: int, name: str, what: str) -> int:
        """`dim` counted from the front; refuses an x that is not this rank's shard along `dim`."""
        if not isinstance(x, Sharded):
            raise ValueError(f"{what} takes what split or switch gave, got {type(x).__name__}")
        dim = dimension(x.tensor, dim, name)
        if dim != x.dim:
            raise ValueError(
                f"cannot {what} with {name} {dim}: the tensor is sharded along dimension {x.dim}, "
                f"not along {dim}"
            )
        if len(x.sizes) != self.size or x.tensor.shape[dim] != x.sizes[self.rank]:
            raise ValueError(
                f"the shard of {self.comm.me} must have the size that {x.sizes} "
                f"give it along dimension {dim}, got the shape {tuple(x.tensor.shape)}"
            )
        return dim

    def _check_same_shards(self, x: Sharded, options: dict[str, int], name: str | None) -> None:
        """Check that all ranks hold shards of one tensor and pass the same options."""
        same = {
            "dim": x.dim,
            "sizes": fingerprint(x.sizes),
            "dtype": fingerprint(x.tensor.dtype),
            "shape beside dim": fingerprint(_resized(x.tensor.shape, x.dim, -1)),
        }
        self._consistency.check(same | options, {}, x.tensor, layer=name)


def chunk_sizes(length: int, num_ranks: int) -> Sizes:
    """Rows of each rank's chunk in the contiguous layout; some are 0 if length < num_ranks."""
    edges = [rank * length // num_ranks for rank in range(num_ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(edges))


def ranges_of(sizes: Sizes) -> Layout:
    """The layout in which rank r owns the next `sizes[r]` rows, one range that may be empty."""
    return tuple(
        ((stop - size, stop),) for size, stop in zip(sizes, accumulate(sizes), strict=True)
    )


ShardedDim = tuple[int, Sizes]  # a dimension, and the rows that each rank holds


def _exchange(
    comm: Communicator, old: ShardedDim, new: ShardedDim, x: Tensor, label: str
) -> Tensor:
    """This rank's shard along the new dimension, from x, its shard along the old one."""
    (dim, sizes), (new_dim, new_sizes) = old, new
    parts = x.split(new_sizes, new_dim)
    shapes = [_resized(parts[comm.rank].shape, dim, size) for size in sizes]
    return torch.cat(all_to_all(comm, label, parts, shapes), dim)


def _take_sum(comm: Communicator, layout: Layout, dim: int, x: Tensor, label: str) -> Tensor:
    """This rank's chunk of the sum over ranks of x, a whole tensor that is equal on all ranks."""
    return take_shard(comm, layout, dim, x, label) * comm.size


def _zero_padded(comm: Communicator, layout: Layout, dim: int, x: Tensor, label: str) -> Tensor:
    """A whole tensor with x, this rank's chunk, in its place and zeros elsewhere."""
    ((start, stop),) = layout[comm.rank]
    ((_, length),) = layout[-1]
    whole = x.new_zeros(_resized(x.shape, dim, length))
    whole.narrow(dim, start, stop - start).copy_(x)
    return whole


def _resized(shape: Size, dim: int, size: int) -> Size:
    return Size((*shape[:dim], size, *shape[dim + 1 :]))
