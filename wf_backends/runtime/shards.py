"""Taking a rank's shard of a whole tensor, and gathering the shards of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.comm import Communicator
from wf_backends.lowering import parcels
from wf_backends.runtime.messages import Messages
from wf_backends.schedule import Layout, Ranges, intersect, join, size


def dimension(x: Tensor, dim: int, name: str = "dim") -> int:
    """`dim` as a non-negative number.

    Raises:
        ValueError: if x has no such dimension, the error calls it `name`, or is a DTensor.
    """
    if hasattr(x, "to_local"):  # its operators wait for all ranks, which take other rows each
        raise ValueError(
            "a plain tensor is needed, got a DTensor: pass x.full_tensor() where the whole tensor "
            "is cut, x.to_local() where this rank's rows are gathered"
        )
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{name} must be one of the {x.dim()} dimensions of a tensor {tuple(x.shape)}, "
            f"got {dim!r}"
        )
    return dim % x.dim()


def take_shard(comm: Communicator, layout: Layout, dim: int, x: Tensor, label: str) -> Tensor:
    """A copy of this rank's rows of the whole x along `dim`. Nothing is sent under `label`."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in layout[comm.rank]]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim).contiguous()


def gather_shards(
    comm: Communicator,
    layout: Layout,
    dim: int,
    x: Tensor,
    label: str,
    needed: Layout | None = None,
) -> Tensor:
    """The rows along `dim` that this rank needs, in sequence order; x holds those that it owns.

    Args:
        layout, needed: by rank, the positions that it owns and that it needs; None = all.
    """
    needed = needed or (join(piece for shard in layout for piece in shard),) * len(layout)
    own, held = layout[comm.rank], needed[comm.rank]
    rows = x.movedim(dim, 0).contiguous()
    buffer = rows.new_empty((size(held), *rows.shape[1:]))
    messages = Messages(comm, label)
    for peer in range(comm.size):
        messages.send(parcels(peer, intersect(own, needed[peer]), own), (rows,))
        messages.receive(parcels(peer, intersect(layout[peer], held), held), (buffer,))
    messages.post().wait()
    return buffer.movedim(0, dim).contiguous()


def positions(shard: Ranges, device: torch.device | None = None) -> Tensor:
    """(s,) int64: the global positions of a shard's rows."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in shard])
