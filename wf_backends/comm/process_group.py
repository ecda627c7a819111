"""A torch.distributed process group (gloo, NCCL) as a communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from wf_backends.comm.protocol import CONTROL, NOBODYS_TAG, Message, Pending, Wait
from wf_backends.comm.staging import Staged
from wf_backends.comm.watch import ProcessComm


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long operations of a group wait for peers; None if this torch does not tell.

    For groups that are made of it: they would have the library's default, not its parent's.
    """
    device, _ = dist.get_backend_config(group).split(",")[0].split(":")
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", None)


def as_timeout(seconds: float | None, parent: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group that is made: what is asked for, or the parent's."""
    return timeout_of(parent) if seconds is None else timedelta(seconds=seconds)


def own_group(timeout: float | None = None) -> dist.ProcessGroup | None:
    """A new group of all ranks, which all must call this; None if there is no job.

    NCCL has one queue for each group: what a framework gathers and reduces in the default group
    would hold up the messages of attention.

    Args:
        timeout: seconds that its operations wait for peers; None = as those of the default group.
    """
    world = dist.group.WORLD
    if world is None:
        return None
    group = dist.new_group(timeout=as_timeout(timeout, world))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


class GroupComm(ProcessComm):
    """A process group; peers are ranks inside the group.

    CPU tensors travel by gloo, CUDA tensors by NCCL where the group has it and otherwise through
    host copies. A peer that does not answer is reported after the timeout the group was made with.
    With NCCL `wait` orders the current stream and returns, so that its errors come from
    torch.distributed's watchdog, and making a communicator is collective over the group.

    Args:
        group: None = the default group.
        timeout: seconds that a wait of gloo waits; None = as the group says.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None
        self.group: dist.ProcessGroup = found
        ranks = dist.get_process_group_ranks(found)
        super().__init__(dist.get_rank(group), len(ranks), ranks)
        self.timeout = () if timeout is None else (timedelta(seconds=timeout),)
        pairs = dist.get_backend_config(found).split(",")  # such as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)
        self.on_host = "cpu" in self._backends
        if self._backends.get("cuda") == "nccl":
            # NCCL connects at the first operation, in which every rank must take part
            device = found.bound_device_id or torch.device("cuda", torch.cuda.current_device())
            dist.all_reduce(torch.zeros(1, device=device), group=found)

    def watch(self) -> None:
        """See Communicator.watch. A wait of NCCL orders a stream, and is watched by torch."""
        if self._backends.get("cpu") == "gloo":
            super().watch()

    def break_off(self, verdict: str) -> None:
        """End the running wait: what no peer sends closes all connections as it times out."""
        self.verdict = verdict
        nothing, peer = torch.empty(1), (self.rank + 1) % self.size
        with suppress(RuntimeError):
            self.group.recv([nothing], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))

    def carries(self, device: torch.device) -> bool:
        """See Communicator.carries; gloo copies what is not on the host."""
        return self._backends.get(device.type) == ("gloo" if device.type == "cpu" else "nccl")

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if not (sends or recvs):
            return _GroupPending(self, label, [])
        if label in CONTROL:  # a header goes before every call; a look at each message would cost
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
        """Refuse a group that torch no longer knows: gloo would go on with it, or hang."""
        try:
            dist.get_group_rank(self.group, self.global_ranks[self.rank])
        except ValueError as error:
            raise RuntimeError(
                f"{self.me}: the process group was destroyed (destroy_process_group() of "
                "torch.distributed): make a SequenceParallel of a new one"
            ) from error

    def _post_each(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Receives first: gloo takes twice as long in the other order.

        What is empty is left out: both sides know the sizes.
        """
        works: list[tuple[str, int, dist.Work]] = []
        tag, group = CONTROL.get(label, self.tag), self.group
        ways = ("message from", group.recv, recvs), ("message to", group.send, sends)
        for kind, start, messages in ways:
            for peer, tensor in messages:
                if not tensor.numel():
                    continue
                tensor = tensor.detach() if tensor.requires_grad else tensor
                try:
                    works.append((kind, peer, start([tensor], peer, tag)))
                except RuntimeError as error:
                    raise self.failed(label, kind, peer, error) from error
        return _GroupPending(self, label, works)

    def _post_batch(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        """One NCCL launch; `wait` orders the current stream after it and does not stop the host."""
        ops = [
            dist.P2POp(start, tensor.detach(), self.global_ranks[peer], group=self.group)
            for start, messages in ((dist.irecv, recvs), (dist.isend, sends))
            for peer, tensor in messages
            if tensor.numel()
        ]
        kind, peer = "messages from and to", min(peer for peer, _ in (*sends, *recvs))
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self.failed(label, kind, peer, error) from error
        return _GroupPending(self, label, [(kind, peer, work) for work in works], keep=ops)


@dataclass(eq=False)
class _GroupPending(Pending):
    comm: GroupComm
    label: str
    works: list[tuple[str, int, dist.Work]]
    keep: object = None  # buffers stay alive until waited for

    def wait(self) -> None:
        comm, since = self.comm, time.monotonic()
        for kind, peer, work in self.works:
            comm.waits = Wait(comm.now, self.label, kind, peer, since)
            try:
                work.wait(*comm.timeout)
            except RuntimeError as error:
                raise comm.failed(self.label, kind, peer, error) from error
        comm.waits = None
        self.works, self.keep = [], None
