"""Exchanges between ranks that all wait for them: all-to-all, sums, small tensors and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from wf_backends.comm.protocol import Communicator, Message

Round = tuple[list[Message], list[Message]]  # sends, receives


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


def sum_over_ranks(comm: Communicator, x: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks, without a gradient. Not counted as traffic."""
    return gather_small(comm, x).sum(0)


def gather_small(comm: Communicator, x: Tensor) -> Tensor:
    """The small tensors of all ranks, stacked by rank. Not counted as traffic."""
    device = x.device if comm.carries(x.device) else comm.home(x)  # a host copy waits for x
    held = x.new_empty((comm.size, *x.shape), device=device)
    held[0] = x
    for sends, recvs in doubling(comm, held):
        comm.post("gather", sends, recvs).wait()
    return held.flip(0).roll(comm.rank + 1, 0).to(x.device)


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """The texts of all ranks, by rank, in two rounds of messages. Not counted as traffic."""
    data = text.encode()
    sizes = gather_small(comm, torch.tensor([len(data)])).flatten().tolist()
    mine = torch.tensor([*data.ljust(max(sizes))], dtype=torch.uint8)
    rows = gather_small(comm, mine).tolist()
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def doubling(comm: Communicator, held: Tensor) -> Iterator[Round]:
    """The rounds (sends, receives) after which row i of `held` is that of rank r - i.

    Rank r, whose own row is row 0, sends what it holds to the rank as far ahead as it holds rows,
    so that every round doubles them: ceil(log2 P) messages of a rank, not P - 1 (Bruck et al.
    1997, section 3).
    """
    rank, size, ahead = comm.rank, comm.size, 1
    while ahead < size:
        count = min(ahead, size - ahead)
        out, into = held[:count], held[ahead : ahead + count]
        yield [((rank + ahead) % size, out)], [((rank - ahead) % size, into)]
        ahead += count
