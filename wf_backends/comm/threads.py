"""Ranks as threads of one process: exact tests and explanations without a launcher.

Stricter than a network on purpose. A buffer that is read before its receive was waited for holds
NaN, a buffer that is changed before its send was waited for is reported, and what one post sends to
a peer must be what one post of that peer receives, so that a program that is right here is also
right where messages really take time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TypeVar

import torch
from torch import Tensor

from wf_backends.comm.protocol import CONTROL, Communicator, Message, Pending

T = TypeVar("T")
Ticket = tuple[int, int, int, int]  # sender, receiver, which of this pair's posts, which message


class World:
    """What the ranks of one process share: messages on their way, and who failed or left.

    Args:
        size: number of ranks.
        timeout: seconds that a receive waits for its peer.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self.failure: tuple[int, BaseException] | None = None
        self._lock = Lock()
        self._changed = [Condition(self._lock) for _ in range(size)]  # for the rank that waits
        self._mail: dict[Ticket, tuple[Tensor, int, str]] = {}
        self._left: set[int] = set()

    def comm(self, rank: int) -> ThreadComm:
        """The communicator of `rank`, to be used by one thread. Call it once per rank."""
        return ThreadComm(self, rank)

    def abort(self, rank: int, error: BaseException) -> None:
        """Say that `rank` failed: every wait, running or future, raises. The first error stays."""
        with self._lock:
            self.failure = self.failure or (rank, error)
            self._wake_all()

    def leave(self, rank: int) -> None:
        """Say that `rank` sends nothing more: waits for a message it never sent raise at once."""
        with self._lock:
            self._left.add(rank)
            self._wake_all()

    def put(self, ticket: Ticket, message: tuple[Tensor, int, str]) -> None:
        receiver = ticket[1]
        with self._lock:
            self._mail[ticket] = message
            self._changed[receiver].notify_all()

    def take(self, ticket: Ticket, label: str) -> tuple[Tensor, int, str]:
        """The message with this ticket, its tag and its sender's pass, as soon as it is there.

        Raises:
            RuntimeError: if a rank failed, or the sender left or let the timeout pass.
        """
        sender, receiver, *_ = ticket

        def settled() -> bool:
            return ticket in self._mail or self.failure is not None or sender in self._left

        with self._lock:
            in_time = self._changed[receiver].wait_for(settled, self.timeout)
            if ticket in self._mail:
                return self._mail.pop(ticket)
            what = f"rank {receiver} waits for a message of rank {sender} in {label!r}, but "
            if self.failure is not None:
                rank, error = self.failure
                raise RuntimeError(f"{what}rank {rank} failed: {error!r}")
            if not in_time:
                raise RuntimeError(f"{what}none came within {self.timeout:g} s")
            raise RuntimeError(f"{what}rank {sender} ended without sending it")

    def _wake_all(self) -> None:
        for changed in self._changed:
            changed.notify_all()


class ThreadComm(Communicator):
    """One rank of a `World`."""

    on_host = True

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world
        self._posts: Counter[tuple[int, int]] = Counter()  # by (sender, receiver)

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        for peer, tensor in (*sends, *recvs):
            assert peer != self.rank, f"{label!r}: rank {self.rank} sends to itself"
            assert tensor.is_contiguous(), f"{label!r}: a buffer is not contiguous"
        tag = CONTROL.get(label, self.tag)
        landing = self._tickets((peer, self.rank) for peer, _ in recvs)
        expected = [(ticket, tensor) for ticket, (_, tensor) in zip(landing, recvs, strict=True)]
        for _, tensor in expected:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        sent = []
        leaving = self._tickets((self.rank, peer) for peer, _ in sends)
        for ticket, (peer, tensor) in zip(leaving, sends, strict=True):
            message = tensor.detach().clone()
            self.world.put(ticket, (message, tag, str(self.now)))
            sent.append((peer, tensor, message))
        return _ThreadPending(self, label, tag, sent, expected)

    def _tickets(self, pairs: Iterable[tuple[int, int]]) -> list[Ticket]:
        """One for each message of a post, given its (sender, receiver)."""
        found, before = list[Ticket](), Counter[tuple[int, int]]()
        for pair in pairs:
            self._posts[pair] += not before[pair]
            found.append((*pair, self._posts[pair], before[pair]))
            before[pair] += 1
        return found


@dataclass(eq=False)
class _ThreadPending(Pending):
    comm: ThreadComm
    label: str
    tag: int
    sent: list[tuple[int, Tensor, Tensor]]
    expected: list[tuple[Ticket, Tensor]]

    def wait(self) -> None:
        for peer, tensor, message in self.sent:
            if not torch.equal(_bits(tensor), _bits(message)):
                raise RuntimeError(
                    f"rank {self.comm.rank} changed a buffer after posting its send to rank {peer} "
                    f"in {self.label!r} and before waiting for it"
                )
        for ticket, buffer in self.expected:
            sender, receiver, *_ = ticket
            message, tag, pass_ = self.comm.world.take(ticket, self.label)
            if tag != self.tag:
                raise RuntimeError(
                    f"rank {receiver}, in {self.comm.now}, waits for a message of rank {sender} in "
                    f"{self.label!r}, which is in {pass_}"
                )
            sent, wanted = (f"{x.numel()} x {x.dtype}" for x in (message, buffer))
            if sent != wanted:
                raise RuntimeError(
                    f"in {self.label!r} rank {sender} sent {sent} to rank {receiver}, which "
                    f"expects {wanted}"
                )
            buffer.detach().view(-1).copy_(message.view(-1))
        self.sent, self.expected = [], []


def run_threads(size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks, one thread each.

    Returns:
        What fn returned, by rank.

    Raises:
        Exception: the first error of any rank, as that rank raised it.
    """
    world = World(size, timeout)
    results: dict[int, T] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = fn(world.comm(rank), *args)
            world.leave(rank)
        except BaseException as error:  # the caller gets it, whatever it is
            world.abort(rank, error)

    threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure[1]
    return [results[rank] for rank in range(size)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
