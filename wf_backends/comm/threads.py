"""Ranks as threads of one process: exact tests and explanations without a launcher.

Deliberately stricter than a network, so that a program that is right here is also right where
messages take time. A receive buffer holds NaN until it was waited for. A send buffer that changes
before it was waited for is an error. All messages that one post sends to a peer must be received by
one post of that peer.
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
Ticket = tuple[int, int, int, int]  # sender, receiver, number of their post, number of the message


class World:
    """The state that the ranks of one process share: messages in flight, ranks that failed or left.

    Args:
        size: number of ranks.
        timeout: seconds that a receive waits for its peer.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self.failure: tuple[int, BaseException] | None = None
        self._lock = Lock()
        self._changed = [Condition(self._lock) for _ in range(size)]  # by the rank that waits
        self._mail: dict[Ticket, tuple[Tensor, int, str]] = {}
        self._ended_ranks: set[int] = set()

    def comm(self, rank: int) -> ThreadComm:
        """The communicator of `rank`, to be used by one thread. Call it once per rank."""
        return ThreadComm(self, rank)

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Record that `rank` has ended: waits for a message that it did not send raise at once.
        If it failed by an error, all running and future waits raise the first such error."""
        with self._lock:
            self._ended_ranks.add(rank)
            if error is not None and self.failure is None:
                self.failure = rank, error
            for changed in self._changed:
                changed.notify_all()

    def put(self, ticket: Ticket, message: tuple[Tensor, int, str]) -> None:
        """Deliver a message: its data, its tag and the name of its sender's pass."""
        receiver = ticket[1]
        with self._lock:
            self._mail[ticket] = message
            self._changed[receiver].notify_all()

    def take(self, ticket: Ticket, label: str) -> tuple[Tensor, int, str]:
        """Wait for the message with this ticket; return it as `put` got it.

        Raises:
            RuntimeError: if a rank failed, if the sender ended, or after the timeout.
        """
        sender, receiver, *_ = ticket

        def is_decided() -> bool:
            return ticket in self._mail or self.failure is not None or sender in self._ended_ranks

        with self._lock:
            in_time = self._changed[receiver].wait_for(is_decided, self.timeout)
            if ticket in self._mail:
                return self._mail.pop(ticket)
            wait = f"rank {receiver} waits for a message of rank {sender} in {label!r}, but "
            if self.failure is not None:
                rank, error = self.failure
                raise RuntimeError(f"{wait}rank {rank} failed: {error!r}")
            if not in_time:
                raise RuntimeError(f"{wait}none came within {self.timeout:g} s")
            raise RuntimeError(f"{wait}rank {sender} ended without sending it")


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
        recv_tickets = self._tickets((peer, self.rank) for peer, _ in recvs)
        expected = [(ticket, x) for ticket, (_, x) in zip(recv_tickets, recvs, strict=True)]
        for _, tensor in expected:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        sent: list[tuple[int, Tensor, Tensor]] = []
        send_tickets = self._tickets((self.rank, peer) for peer, _ in sends)
        for ticket, (peer, tensor) in zip(send_tickets, sends, strict=True):
            message = tensor.detach().clone()
            self.world.put(ticket, (message, tag, str(self.current_pass)))
            sent.append((peer, tensor, message))
        return _ThreadPending(self, label, tag, sent, expected)

    def _tickets(self, pairs: Iterable[tuple[int, int]]) -> list[Ticket]:
        """The tickets of a post's messages, from the (sender, receiver) of each message."""
        tickets: list[Ticket] = []
        num_messages: Counter[tuple[int, int]] = Counter()
        for pair in pairs:
            if num_messages[pair] == 0:
                self._posts[pair] += 1
            tickets.append((*pair, self._posts[pair], num_messages[pair]))
            num_messages[pair] += 1
        return tickets


@dataclass(eq=False)
class _ThreadPending(Pending):
    comm: ThreadComm
    label: str
    tag: int
    sent: list[tuple[int, Tensor, Tensor]]  # peer, buffer, what was sent
    expected: list[tuple[Ticket, Tensor]]  # ticket, buffer

    def wait(self) -> None:
        for peer, tensor, message in self.sent:
            if not torch.equal(_bits(tensor), _bits(message)):
                raise RuntimeError(
                    f"rank {self.comm.rank} changed a buffer after posting its send to rank {peer} "
                    f"in {self.label!r} and before waiting for it"
                )
        for ticket, buffer in self.expected:
            sender, receiver, *_ = ticket
            message, tag, senders_pass = self.comm.world.take(ticket, self.label)
            if tag != self.tag:
                raise RuntimeError(
                    f"rank {receiver}, in {self.comm.current_pass}, waits for a message of rank "
                    f"{sender} in {self.label!r}, which is in {senders_pass}"
                )
            sent, expected = (f"{x.numel()} x {x.dtype}" for x in (message, buffer))
            if sent != expected:
                raise RuntimeError(
                    f"in {self.label!r} rank {sender} sent {sent} to rank {receiver}, which "
                    f"expects {expected}"
                )
            buffer.detach().view(-1).copy_(message.view(-1))
        self.sent, self.expected = [], []


def run_threads(size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks, one thread each.

    Returns:
        The results of `fn`, by rank.

    Raises:
        Exception: the first error of any rank, as that rank raised it.
    """
    world = World(size, timeout)
    results: dict[int, T] = {}

    def run_rank(rank: int) -> None:
        try:
            results[rank] = fn(world.comm(rank), *args)
            world.leave(rank)
        except BaseException as error:  # run_threads raises it, whatever its class
            world.leave(rank, error)

    threads = [Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure[1]
    return [results[rank] for rank in range(size)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
