"""Exchanges between ranks that all wait for them: which messages are sent when; parts and sums.

Everything at once is unfair where a NIC carries it: the flows share the NIC by chance, so that some
ranks have all they need while others still wait for several, and links idle. In turns, rank r meets
r ^ t at turn t: no two ranks write to one at the same time, and every NIC is full in both ways.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Size, Tensor

from wf_backends.comm.protocol import Communicator, Message, Pending

Sizes = tuple[int, ...]  # rows of every rank along a dimension

TURNS = 2  # on the way at a time at least, so that the latency of one passes during the other


@dataclass(frozen=True, slots=True)
class _Flight:
    """Messages on their way, from and to the peers of one turn or of all."""

    peers: list[int]
    sends: list[Message]
    num_bytes: int
    pending: Pending


def exchange(
    comm: Communicator, label: str, sends: Sequence[Message], recvs: Sequence[Message]
) -> Iterator[int]:
    """Post messages and wait for them, peer by peer where `comm.window` asks for turns.

    Nothing is posted before the first rank is asked for.

    Args:
        sends: packed as their turn comes if they are not contiguous. recvs: contiguous. Both as in
            `Communicator.post`; messages of one peer keep their order.

    Yields:
        Every rank whose messages are here: this rank, with the first on their way, then the peers.
    """
    out, into = _by_peer(sends), _by_peer(recvs)
    peers = sorted({*out, *into}, key=comm.rank.__xor__)
    window = comm.window((*sends, *recvs)[0][1].device) if peers else None
    waiting = deque([peers] if window is None and peers else [[peer] for peer in peers])
    flying: deque[_Flight] = deque()

    def fill() -> None:
        while waiting and (len(flying) < TURNS or sum(f.num_bytes for f in flying) < (window or 0)):
            flying.append(_post(comm, label, waiting.popleft(), out, into))

    fill()
    yield comm.rank
    while flying:
        flight = flying.popleft()
        flight.pending.wait()
        fill()
        yield from flight.peers


def _by_peer(messages: Sequence[Message]) -> dict[int, list[Tensor]]:
    found: defaultdict[int, list[Tensor]] = defaultdict(list)
    for peer, tensor in messages:
        found[peer].append(tensor)
    return found


def _post(
    comm: Communicator,
    label: str,
    peers: list[int],
    out: Mapping[int, list[Tensor]],
    into: Mapping[int, list[Tensor]],
) -> _Flight:
    """Start all messages from and to these peers."""
    sends = [(peer, tensor.contiguous()) for peer in peers for tensor in out.get(peer, ())]
    recvs = [(peer, tensor) for peer in peers for tensor in into.get(peer, ())]
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
    return _Flight(peers, sends, num_bytes, comm.post(label, sends, recvs))


def chunk_sizes(length: int, num_ranks: int) -> Sizes:
    """Rows of every rank in the contiguous layout; 0 for some where there are fewer than ranks."""
    edges = [rank * length // num_ranks for rank in range(num_ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(edges))


def all_to_all(
    comm: Communicator, label: str, parts: Sequence[Tensor], shapes: Sequence[Size]
) -> list[Tensor]:
    """Send parts[r] to rank r, and return what every rank sent here.

    Args:
        parts: one tensor for each rank; this rank's own is returned as it is.
        shapes: what arrives from each rank; an empty part is not sent.
    """
    own = parts[comm.rank]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    arriving = [own if rank == comm.rank else own.new_empty(s) for rank, s in enumerate(shapes)]
    sends = [(rank, parts[rank]) for rank in others if parts[rank].numel()]
    recvs = [(rank, arriving[rank]) for rank in others if arriving[rank].numel()]
    for _ in exchange(comm, label, sends, recvs):
        pass
    return arriving


def sum_on_all_ranks(comm: Communicator, x: Tensor, label: str, divisor: int = 1) -> Tensor:
    """The sum of every rank's x / divisor, on all ranks: every rank sums one chunk for all.

    Travels in x's dtype, is summed in float32 or wider. A rank sends 2 (P - 1) / P of x's bytes.
    """
    parts = x.flatten().split(chunk_sizes(x.numel(), comm.size))
    mine = parts[comm.rank]
    theirs = all_to_all(comm, f"{label} reduce", parts, [mine.shape] * comm.size)
    total = mine.new_zeros(mine.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for part in theirs:
        total += part
    own = (total / divisor).to(x.dtype)
    shapes = [part.shape for part in parts]
    return torch.cat(all_to_all(comm, f"{label} gather", [own] * comm.size, shapes)).view_as(x)
