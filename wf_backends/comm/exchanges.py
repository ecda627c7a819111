"""Exchanges between ranks that all wait for them: all-to-all, and a sum on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from wf_backends.comm.protocol import Communicator


def all_to_all(
    comm: Communicator, label: str, parts: Sequence[Tensor], shapes: Sequence[Size]
) -> list[Tensor]:
    """Send parts[r] to rank r, and return what every rank sent here.

    Args:
        parts: one tensor for each rank; this rank's own is returned as it is.
        shapes: what arrives from each rank; an empty part is not sent.
    """
    own = parts[comm.rank]
    others = sorted(range(comm.size), key=comm.rank.__xor__)[1:]  # not all begin with rank 0
    arriving = [own if rank == comm.rank else own.new_empty(s) for rank, s in enumerate(shapes)]
    sends = [(rank, parts[rank].contiguous()) for rank in others if parts[rank].numel()]
    recvs = [(rank, arriving[rank]) for rank in others if arriving[rank].numel()]
    comm.post(label, sends, recvs).wait()
    return arriving


def sum_on_all_ranks(comm: Communicator, x: Tensor, label: str, divisor: int = 1) -> Tensor:
    """The sum of every rank's x / divisor, on all ranks: every rank sums one chunk for all.

    Travels in x's dtype, is summed in float32 or wider. A rank sends 2 (P - 1) / P of x's bytes.
    """
    parts = x.flatten().tensor_split(comm.size)
    mine = parts[comm.rank]
    theirs = all_to_all(comm, f"{label} reduce", parts, [mine.shape] * comm.size)
    total = mine.new_zeros(mine.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for part in theirs:
        total += part
    own = (total / divisor).to(x.dtype)
    shapes = [part.shape for part in parts]
    return torch.cat(all_to_all(comm, f"{label} gather", [own] * comm.size, shapes)).view_as(x)
