"""The contract of every communicator: the same checks on threads, gloo and MPI.

Each check is called on every rank at once and raises where the contract is broken.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from wf_backends.comm import Communicator, Message, make_comm

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)


def peers(comm: Communicator) -> list[int]:
    return [peer for peer in range(comm.size) if peer != comm.rank]


def message(sender: int, receiver: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, exact in every dtype and different for every message."""
    return torch.arange(5).add(7 * sender + 13 * receiver + 29 * index).to(dtype)


def exchange(comm: Communicator, dtype: torch.dtype = torch.float32, index: int = 0) -> None:
    """Every rank sends a message to every other rank, which receives that message."""
    sends = [(peer, message(comm.rank, peer, index, dtype)) for peer in peers(comm)]
    recvs = [(peer, torch.empty(5, dtype=dtype)) for peer in peers(comm)]
    comm.post("exchange", sends, recvs).wait()
    for peer, received in recvs:
        assert torch.equal(received, message(peer, comm.rank, index, dtype)), (peer, received)


def every_dtype(comm: Communicator) -> None:
    for index, dtype in enumerate(DTYPES):
        exchange(comm, dtype, index)


def order_is_kept_with_many_in_flight(comm: Communicator) -> None:
    """Messages of a pair of ranks arrive in the order of the posts, in any order of the waits."""
    rounds = []
    for index in range(6):
        sends = [(peer, message(comm.rank, peer, index, torch.float32)) for peer in peers(comm)]
        recvs = [(peer, torch.empty(5)) for peer in peers(comm)]
        rounds.append((comm.post(f"round {index}", sends, recvs), recvs, sends))
    for index in reversed(range(6)):
        pending, recvs, _ = rounds[index]
        pending.wait()
        for peer, received in recvs:
            expected = message(peer, comm.rank, index, torch.float32)
            assert torch.equal(received, expected), (index, peer)


def three_messages_to_one_peer(comm: Communicator) -> None:
    if comm.size == 1:
        return
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    dtypes = (torch.bfloat16, torch.float32, torch.int64)
    sends = [(right, message(comm.rank, right, i, dtype)) for i, dtype in enumerate(dtypes)]
    recvs = [(left, torch.empty(5, dtype=dtype)) for dtype in dtypes]
    comm.post("three messages", sends, recvs).wait()
    for index, (_, received) in enumerate(recvs):
        expected = message(left, comm.rank, index, dtypes[index])
        assert torch.equal(received, expected), (index, received)


def small_and_large_messages_in_one_post(comm: Communicator) -> None:
    """Messages of several sizes and dtypes to one peer: each arrives in its own buffer."""
    sizes = (3, 1 << 17, 0, 5, 1 << 18, 1)
    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.int64, torch.float16, torch.bool)
    for post in range(2):
        sends, recvs = [], []
        for index, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
            for peer in peers(comm):  # a message is a sum over both ranks: it equals its answer
                value = comm.rank + peer + index + post
                sends.append((peer, torch.full((size,), value).to(dtype)))
                recvs.append((peer, torch.zeros(size, dtype=dtype)))
        pending = comm.post("mixed", sends, recvs)
        pending.wait()
        pending.wait()
        for (_, received), (_, expected) in zip(recvs, sends, strict=True):
            assert torch.equal(received, expected)


def large_messages(comm: Communicator) -> None:
    """In both directions and above any eager limit: no send may wait for the peer's receive."""
    count = 1 << 20
    sends = [(peer, torch.full((count,), float(comm.rank))) for peer in peers(comm)]
    recvs = [(peer, torch.empty(count)) for peer in peers(comm)]
    pending = comm.post("large", sends, recvs)
    pending.poll()
    pending.wait()
    assert all(bool((received == peer).all()) for peer, received in recvs)


def one_way(comm: Communicator) -> None:
    """Rank 0 only sends, rank 1 only receives, the other ranks post nothing."""
    if comm.size == 1:
        return
    sends: list[Message] = [(1, torch.ones(3))] if comm.rank == 0 else []
    recvs: list[Message] = [(0, torch.empty(3))] if comm.rank == 1 else []
    comm.post("one way", sends, recvs).wait()
    assert all(torch.equal(received, torch.ones(3)) for _, received in recvs)


def an_empty_post(comm: Communicator) -> None:
    pending = comm.post("empty post", [], [])
    pending.poll()
    pending.wait()
    pending.wait()


def empty_tensors(comm: Communicator) -> None:
    """A tensor without elements is a message: later messages are received as usual."""
    sends = [(peer, torch.empty(0, 4)) for peer in peers(comm)]
    recvs = [(peer, torch.empty(0, 4)) for peer in peers(comm)]
    comm.post("empty", sends, recvs).wait()
    exchange(comm, index=3)


def buffers_are_slices_and_leaves(comm: Communicator) -> None:
    """A receive buffer is a contiguous slice of a tensor; a send buffer requires a gradient."""
    gathered = torch.zeros(comm.size, 2, 3)
    gathered[comm.rank] = comm.rank + 1
    shard = gathered[comm.rank].clone().requires_grad_()
    recvs = [(peer, gathered[peer]) for peer in peers(comm)]
    comm.post("gather", [(peer, shard) for peer in peers(comm)], recvs).wait()
    expected = torch.arange(1.0, comm.size + 1).view(-1, 1, 1).expand(-1, 2, 3)
    assert torch.equal(gathered, expected)


def one_element_has_any_strides(comm: Communicator) -> None:
    """A message of one element, whose strides no loop reads: torch calls it contiguous."""
    strided = torch.full((1, 1), comm.rank + 1.0).as_strided((1, 1), (8, 0))
    recvs = [(peer, torch.empty(4, 4)[:1, ::4]) for peer in peers(comm)]
    comm.post("one element", [(peer, strided) for peer in peers(comm)], recvs).wait()
    assert all(received.item() == peer + 1 for peer, received in recvs)


def views_are_renumbered(comm: Communicator) -> None:
    """Views of the even and of the odd ranks, in descending order: a peer is a rank in the view."""
    ranks = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    view = comm.view(ranks)
    assert (view.size, ranks[view.rank]) == (len(ranks), comm.rank)
    exchange(view)
    assert view.on_host == comm.on_host
    assert comm.view(list(range(comm.size))) is comm


def bytes_are_counted(comm: Communicator) -> None:
    """Sent bytes are counted by label, also through a view; those of agreement are not counted."""
    comm.sent.clear()
    exchange(comm, torch.bfloat16)
    exchange(comm.view(list(reversed(range(comm.size)))), torch.bfloat16)
    header = [(peer, torch.ones(1)) for peer in peers(comm)]
    buffers = [(peer, torch.empty(1)) for peer in peers(comm)]
    comm.post("agreement", header, buffers).wait()
    assert comm.sent["exchange"] == 2 * 5 * 2 * (comm.size - 1)  # two exchanges of five bfloat16
    assert sum(comm.sent.values()) == comm.sent["exchange"]


def make_comm_returns_a_communicator_unchanged(comm: Communicator) -> None:
    assert make_comm(comm) is comm


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    exchange,
    every_dtype,
    order_is_kept_with_many_in_flight,
    three_messages_to_one_peer,
    small_and_large_messages_in_one_post,
    large_messages,
    one_way,
    an_empty_post,
    empty_tensors,
    buffers_are_slices_and_leaves,
    one_element_has_any_strides,
    views_are_renumbered,
    bytes_are_counted,
    make_comm_returns_a_communicator_unchanged,
)
NAMES = tuple(check.__name__ for check in CHECKS)


def run_all(comm: Communicator) -> dict[str, str]:
    """Run the checks one after another: {name of the first that fails: its traceback}, or {}.

    A failed check leaves messages behind, so the later ones are not run.
    """
    for check in CHECKS:
        try:
            check(comm)
        except Exception:
            return {check.__name__: traceback.format_exc()}
    return {}


def skip_a_message(comm: Communicator) -> str:
    """Rank 0 waits for a message that the last rank never sends: its error, "" on other ranks."""
    last = comm.size - 1
    if comm.rank == 0:
        try:
            comm.post("hop 7", [], [(last, torch.empty(2))]).wait()
        except RuntimeError as error:
            return str(error)
    return ""
