"""Collectives that return when they are done: all-to-all, sums, gathers of small tensors, texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from wf_backends.comm.protocol import Communicator, Message

SendsAndRecvs = tuple[list[Message], list[Message]]  # of one post


def all_to_all(
    comm: Communicator, label: str, parts: Sequence[Tensor], shapes: Sequence[Size]
) -> list[Tensor]:
    """Send parts[r] to rank r, and return the parts that all ranks sent to this rank, by rank.

    Args:
        parts: one tensor for each rank; this rank's own part is returned as it is.
        shapes: the shape of each rank's part for this rank; an empty part is not sent.
    """
    own = parts[comm.rank]
    others = sorted(range(comm.size), key=comm.rank.__xor__)[1:]  # not all begin with rank 0
    received = [own if rank == comm.rank else own.new_empty(s) for rank, s in enumerate(shapes)]
    sends = [(rank, parts[rank].contiguous()) for rank in others if parts[rank].numel()]
    recvs = [(rank, received[rank]) for rank in others if received[rank].numel()]
    comm.post(label, sends, recvs).wait()
    return received


def sum_on_all_ranks(comm: Communicator, x: Tensor, label: str, divisor: int = 1) -> Tensor:
    """All-reduce: the sum of x / divisor over all ranks, on every rank. Each rank sums one part.

    x is sent in its dtype and summed in float32 or wider. A rank sends 2 (P - 1) / P of x's bytes.
    """
    parts = x.flatten().tensor_split(comm.size)
    own = parts[comm.rank]
    addends = all_to_all(comm, f"{label} reduce", parts, [own.shape] * comm.size)
    total = own.new_zeros(own.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for addend in addends:
        total += addend
    mean = (total / divisor).to(x.dtype)
    shapes = [part.shape for part in parts]
    return torch.cat(all_to_all(comm, f"{label} gather", [mean] * comm.size, shapes)).view_as(x)


def sum_over_ranks(comm: Communicator, x: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks, without a gradient. Its bytes are not counted."""
    return gather_small(comm, x).sum(0)


def gather_small(comm: Communicator, x: Tensor, label: str = "gather") -> Tensor:
    """The small tensors x of all ranks, stacked by rank: (P, *x.shape). "gather" is not counted."""
    direct = comm.carries(x.device)  # preferred: a copy on the CPU would wait for x
    device = x.device if direct else comm.small_message_device(x)
    rows = x.new_empty((comm.size, *x.shape), device=device)
    rows[0] = x
    for sends, recvs in doubling(comm, rows):
        comm.post(label, sends, recvs).wait()
    return rows.flip(0).roll(comm.rank + 1, 0).to(x.device)


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """The texts of all ranks, by rank: two gathers. Their bytes are not counted."""
    data = text.encode()
    sizes = gather_small(comm, torch.tensor([len(data)])).flatten().tolist()
    padded = torch.tensor([*data.ljust(max(sizes))], dtype=torch.uint8)
    rows = gather_small(comm, padded).tolist()
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def doubling(comm: Communicator, rows: Tensor) -> Iterator[SendsAndRecvs]:
    """What is posted in turn in an all-gather; then row i of `rows` is rank r - i's.

    Rank r begins with its own row in row 0. In each post it sends all n rows that it holds to rank
    r + n and receives as many, so that ceil(log2 P) messages do in place of P - 1.
    Source: Bruck et al. 1997, section 3.
    """
    rank, size, num_held = comm.rank, comm.size, 1
    while num_held < size:
        count = min(num_held, size - num_held)
        sent, received = rows[:count], rows[num_held : num_held + count]
        yield [((rank + num_held) % size, sent)], [((rank - num_held) % size, received)]
        num_held += count
