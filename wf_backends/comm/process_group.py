"""A torch.distributed process group (gloo, NCCL) as a communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from wf_backends.comm.protocol import CONTROL, UNUSED_TAG, Message, Pending, Staged, Wait
from wf_backends.comm.watch import ProcessComm


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's operations wait; None if this version of torch does not tell it.

    Pass it to `new_group`, whose default is torch's 30 minutes; a group of this timeout counts as
    made without one, and waits as long as the default group.
    """
    device, _ = dist.get_backend_config(group).split(",")[0].split(":")
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    timeout, world = getattr(options, "_timeout", None), dist.group.WORLD
    is_default = timeout == dist.distributed_c10d.default_pg_timeout
    return timeout_of(world) if is_default and world not in (None, group) else timeout


def as_timeout(seconds: float | None, parent: dist.ProcessGroup) -> timedelta | None:
    """`seconds`, or the timeout of the parent group."""
    return timeout_of(parent) if seconds is None else timedelta(seconds=seconds)


def own_group(timeout: float | None = None) -> dist.ProcessGroup | None:
    """A new group of all ranks; None if torch.distributed is not initialised. Call it on all ranks.

    NCCL has one queue per group: in the default group, the messages of attention would wait behind
    a framework's collectives.

    Args:
        timeout: seconds that an operation waits for peers; None = as in the default group.
    """
    world = dist.group.WORLD
    if world is None:
        return None
    group = dist.new_group(timeout=as_timeout(timeout, world))
    assert isinstance(group, dist.ProcessGroup), "the group has all ranks"
    return group


def end_waits(group: dist.ProcessGroup) -> None:
    """End all waits in a group of gloo, on all ranks, by an error: a receive that times out."""
    buffer, timeout = torch.empty(1, device="cpu"), timedelta(milliseconds=1)
    for peer in {*range(group.size())} - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([buffer], peer, UNUSED_TAG).wait(timeout)


class GroupComm(ProcessComm):
    """A communicator over a torch process group; peers are ranks inside the group.

    CPU tensors are sent by gloo, CUDA tensors by NCCL, or as host copies if the group has no NCCL.
    A wait for a peer that does not answer fails after the group's timeout. With NCCL, `wait` orders
    the current stream and returns, errors come from torch.distributed's watchdog, and making a
    communicator is a collective operation of the group.

    Args:
        group: None = the default group.
        timeout: seconds that a wait of gloo waits; None = `timeout_of` the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        group_or_world = dist.group.WORLD if group is None else group
        assert group_or_world is not None
        self.group: dist.ProcessGroup = group_or_world
        ranks = dist.get_process_group_ranks(self.group)
        super().__init__(dist.get_rank(group), len(ranks), ranks)
        wait = as_timeout(timeout, self.group)
        self.wait_args = () if wait is None else (wait,)
        pairs = dist.get_backend_config(self.group).split(",")  # such as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)
        self.on_host = "cpu" in self._backends
        if self._backends.get("cuda") == "nccl":
            # NCCL connects in the first operation, in which every rank must take part.
            device = self.group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        if self._backends.get("cpu") == "gloo":  # torch itself watches the operations of NCCL
            self.start_watch()

    def break_off(self, verdict: str) -> None:
        super().break_off(verdict)
        end_waits(self.group)

    def carries(self, device: torch.device) -> bool:
        """See Communicator.carries. Gloo sends only CPU tensors without a copy."""
        return self._backends.get(device.type) == ("gloo" if device.type == "cpu" else "nccl")

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if not (sends or recvs):
            return _GroupPending(self, label, [])
        if label in CONTROL:  # every call begins with a header: checking that message is enough
            self._refuse_destroyed()
        device = (sends or recvs)[0][1].device.type
        backend = self._backends.get(device)
        if backend is None:
            raise ValueError(
                f"the process group ({self._backends}) cannot move {device} tensors, which "
                f"{label!r} sends: initialise it with a backend for {device}"
            )
        if backend == "nccl":
            return self._post_batch(label, sends, recvs)
        if device != "cpu":
            return Staged(self._post_each, label, sends, recvs)
        return self._post_each(label, sends, recvs)

    def _refuse_destroyed(self) -> None:
        """Raise if the group was destroyed: gloo would use it all the same, or hang."""
        try:
            dist.get_group_rank(self.group, self.global_ranks[self.rank])
        except ValueError as error:
            raise RuntimeError(
                f"{self.me}: the process group was destroyed (destroy_process_group() of "
                "torch.distributed): make a SequenceParallel of a new one"
            ) from error

    def _post_each(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start every message. Receives first: gloo takes twice as long in the other order.

        Empty messages are not sent: both sides know the sizes.
        """
        works: list[tuple[str, int, dist.Work]] = []
        tag, group = CONTROL.get(label, self.tag), self.group
        receiving, sending = ("message from", group.recv, recvs), ("message to", group.send, sends)
        for transfer, start, messages in (receiving, sending):
            for peer, tensor in messages:
                if tensor.numel() == 0:
                    continue
                tensor = tensor.detach() if tensor.requires_grad else tensor
                try:
                    works.append((transfer, peer, start([tensor], peer, tag)))
                except RuntimeError as error:
                    raise self.failed(label, transfer, peer, error) from error
        return _GroupPending(self, label, works, self.wait_args)

    def _post_batch(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        """Start one NCCL launch; `wait` orders the current stream after it and returns at once."""
        ops = [
            dist.P2POp(start, tensor.detach(), self.global_ranks[peer], group=self.group)
            for start, messages in ((dist.irecv, recvs), (dist.isend, sends))
            for peer, tensor in messages
            if tensor.numel()
        ]
        transfer, lowest_peer = "messages from and to", min(peer for peer, _ in (*sends, *recvs))
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self.failed(label, transfer, lowest_peer, error) from error
        # Without a timeout: NCCL's `wait` would hold the host until the messages have arrived.
        waits = [(transfer, lowest_peer, work) for work in works]
        return _GroupPending(self, label, waits, keep_alive=ops)


@dataclass(eq=False)
class _GroupPending(Pending):
    comm: GroupComm
    label: str
    works: list[tuple[str, int, dist.Work]]  # transfer, peer, work
    wait_args: tuple[timedelta, ...] = ()
    keep_alive: object = None  # the buffers, until waited for

    def wait(self) -> None:
        comm, since = self.comm, time.monotonic()
        for transfer, peer, work in self.works:
            comm.running_wait = Wait(comm.current_pass, self.label, transfer, peer, since)
            try:
                work.wait(*self.wait_args)
            except RuntimeError as error:
                raise comm.failed(self.label, transfer, peer, error) from error
        comm.running_wait = None
        self.works, self.keep_alive = [], None
