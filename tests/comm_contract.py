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
    """Every rank sends to every other, and gets what was meant for it."""
    sends = [(peer, message(comm.rank, peer, index, dtype)) for peer in peers(comm)]
    recvs = [(peer, torch.empty(5, dtype=dtype)) for peer in peers(comm)]
    comm.post("exchange", sends, recvs).wait()
    for peer, got in recvs:
        assert torch.equal(got, message(peer, comm.rank, index, dtype)), (peer, got)


def every_dtype(comm: Communicator) -> None:
    for index, dtype in enumerate(DTYPES):
        exchange(comm, dtype, index)


def order_is_kept_with_many_in_flight(comm: Communicator) -> None:
    """Messages of one pair arrive in the order posted, whichever is waited for first."""
    rounds = []
    for index in range(6):
        sends = [(peer, message(comm.rank, peer, index, torch.float32)) for peer in peers(comm)]
        recvs = [(peer, torch.empty(5)) for peer in peers(comm)]
        rounds.append((comm.post(f"round {index}", sends, recvs), recvs, sends))
    for index in reversed(range(6)):
        pending, recvs, _ = rounds[index]
        pending.wait()
        for peer, got in recvs:
            assert torch.equal(got, message(peer, comm.rank, index, torch.float32)), (index, peer)


def several_messages_to_one_peer(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    dtypes = (torch.bfloat16, torch.float32, torch.int64)
    sends = [(right, message(comm.rank, right, i, dtype)) for i, dtype in enumerate(dtypes)]
    recvs = [(left, torch.empty(5, dtype=dtype)) for dtype in dtypes]
    comm.post(
        "three at once", sends if comm.size > 1 else [], recvs if comm.size > 1 else []
    ).wait()
    for index, (_, got) in enumerate(recvs if comm.size > 1 else []):
        assert torch.equal(got, message(left, comm.rank, index, dtypes[index])), (index, got)


def small_ones_among_large_ones(comm: Communicator) -> None:
    """Several of one post to a peer, small and large, of several dtypes: none is mixed up."""
    sizes = (3, 1 << 17, 0, 5, 1 << 18, 1)
    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.int64, torch.float16, torch.bool)
    kinds = list(zip(sizes, dtypes, strict=True))
    for index in range(2):
        sends = [
            (peer, torch.full((size,), comm.rank + peer + at + index).to(dtype))
            for at, (size, dtype) in enumerate(kinds)
            for peer in peers(comm)
        ]
        recvs = [
            (peer, torch.zeros(size, dtype=dtype)) for size, dtype in kinds for peer in peers(comm)
        ]
        pending = comm.post("mixed", sends, recvs)
        pending.wait()
        pending.wait()
        for (_, got), (_, sent) in zip(recvs, sends, strict=True):  # both are sums of the ranks
            assert torch.equal(got, sent)


def large_messages(comm: Communicator) -> None:
    """Two-way, above any eager limit: nobody may wait for the other's receive."""
    count = 1 << 20
    sends = [(peer, torch.full((count,), float(comm.rank))) for peer in peers(comm)]
    recvs = [(peer, torch.empty(count)) for peer in peers(comm)]
    pending = comm.post("large", sends, recvs)
    pending.poll()
    pending.wait()
    assert all(bool((got == peer).all()) for peer, got in recvs)


def one_way(comm: Communicator) -> None:
    """A rank that only sends, one that only receives, and others with nothing to do."""
    if comm.size == 1:
        return
    sends: list[Message] = [(1, torch.ones(3))] if comm.rank == 0 else []
    recvs: list[Message] = [(0, torch.empty(3))] if comm.rank == 1 else []
    comm.post("one way", sends, recvs).wait()
    assert all(torch.equal(got, torch.ones(3)) for _, got in recvs)


def nothing_to_do(comm: Communicator) -> None:
    pending = comm.post("nothing", [], [])
    pending.poll()
    pending.wait()
    pending.wait()


def empty_tensors(comm: Communicator) -> None:
    """Zero-size tensors are messages too, and do not shift the ones that follow."""
    sends = [(peer, torch.empty(0, 4)) for peer in peers(comm)]
    recvs = [(peer, torch.empty(0, 4)) for peer in peers(comm)]
    comm.post("empty", sends, recvs).wait()
    exchange(comm, index=3)


def shapes_and_slices(comm: Communicator) -> None:
    """Buffers may be contiguous slices of a larger tensor, and parameters' data."""
    whole = torch.zeros(comm.size, 2, 3)
    whole[comm.rank] = comm.rank + 1
    mine = whole[comm.rank].clone().requires_grad_()
    recvs = [(peer, whole[peer]) for peer in peers(comm)]
    comm.post("gather", [(peer, mine) for peer in peers(comm)], recvs).wait()
    expected = torch.arange(1.0, comm.size + 1).view(-1, 1, 1).expand(-1, 2, 3)
    assert torch.equal(whole, expected)


def views_are_renumbered(comm: Communicator) -> None:
    """The even and the odd ranks, in descending order, each exchange among themselves."""
    ranks = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    view = comm.view(ranks)
    assert (view.size, ranks[view.rank]) == (len(ranks), comm.rank)
    exchange(view)
    assert view.on_host == comm.on_host
    assert comm.view(list(range(comm.size))) is comm


def bytes_are_counted(comm: Communicator) -> None:
    """What is sent is counted under its label, also through a view; control messages are not."""
    comm.sent.clear()
    exchange(comm, torch.bfloat16)
    exchange(comm.view(list(reversed(range(comm.size)))), torch.bfloat16)
    header = [(peer, torch.ones(1)) for peer in peers(comm)]
    landing = [(peer, torch.empty(1)) for peer in peers(comm)]
    comm.post("agreement", header, landing).wait()
    assert comm.sent["exchange"] == 2 * 5 * 2 * (comm.size - 1)  # two exchanges of five bfloat16
    assert sum(comm.sent.values()) == comm.sent["exchange"]


def made_from_itself(comm: Communicator) -> None:
    assert make_comm(comm) is comm


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    exchange,
    every_dtype,
    order_is_kept_with_many_in_flight,
    several_messages_to_one_peer,
    small_ones_among_large_ones,
    large_messages,
    one_way,
    nothing_to_do,
    empty_tensors,
    shapes_and_slices,
    views_are_renumbered,
    bytes_are_counted,
    made_from_itself,
)
NAMES = tuple(check.__name__ for check in CHECKS)


def run_all(comm: Communicator) -> dict[str, str]:
    """Every check in turn: its name -> the traceback of its failure, where it failed.

    A broken exchange leaves messages behind, so what follows a failure is not run.
    """
    for check in CHECKS:
        try:
            check(comm)
        except Exception:
            return {check.__name__: traceback.format_exc()}
    return {}


def skip_a_message(comm: Communicator) -> str:
    """The last rank sends nothing to rank 0, who says so within the timeout."""
    last = comm.size - 1
    if comm.rank == 0:
        try:
            comm.post("hop 7", [], [(last, torch.empty(2))]).wait()
        except RuntimeError as error:
            return str(error)
    return ""
