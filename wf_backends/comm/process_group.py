"""A torch.distributed process group (gloo, NCCL) as a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wf_backends.comm.bundles import post_bundled
from wf_backends.comm.protocol import Communicator, Message, Pending
from wf_backends.comm.staging import Staged

T = TypeVar("T")

WINDOW = 1 << 17  # bytes: what fills a link of 10 Gbit/s for 100 us, a round trip


class GroupComm(Communicator):
    """A process group; peers are ranks inside the group.

    CPU tensors travel by gloo, CUDA tensors by NCCL where the group has it and otherwise through
    host copies. A peer that does not answer is reported after the timeout the group was made with.
    With NCCL `wait` orders the current stream and returns, so that its errors come from
    torch.distributed's watchdog, and making a communicator is collective over the group.

    Args:
        group: None = the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._global_ranks = dist.get_process_group_ranks(self.group)
        pairs = dist.get_backend_config(self.group).split(",")  # such as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)
        self.on_host = "cpu" in self._backends
        if self._backends.get("cuda") == "nccl":
            # NCCL connects at the first operation, in which every rank must take part
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.group)

    def window(self, device: torch.device) -> int | None:
        """NCCL takes everything in one launch; gloo's sockets need turns."""
        return None if self._backends.get(device.type) == "nccl" else WINDOW

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        # both sides know the sizes, so both leave out what is empty
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        devices = {tensor.device.type for _, tensor in (*sends, *recvs)} or {"cpu"}
        assert len(devices) == 1, f"{label!r} mixes tensors of {devices}"
        device = devices.pop()
        if device not in self._backends:
            raise ValueError(
                f"the process group ({self._backends}) cannot move {device} tensors, which "
                f"{label!r} sends: initialise it with a backend for {device}"
            )
        if self._backends[device] == "nccl":
            return self._post_batch(label, sends, recvs)
        if device != "cpu":
            return Staged(self._post_on_host, label, sends, recvs)
        return self._post_on_host(label, sends, recvs)

    def _post_on_host(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        return post_bundled(self._post_each, label, sends, recvs)

    def _post_each(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Receives first: gloo takes twice as long in the other order."""
        works: list[tuple[str, dist.Work]] = []
        for way, start, messages in (("from", dist.irecv, recvs), ("to", dist.isend, sends)):
            for peer, tensor in messages:
                what = f"{label!r}, the message {way} rank {peer}"
                works.append((what, self._start(what, start, tensor, peer)))
        return _GroupPending(self, works)

    def _start(
        self, what: str, start: Callable[..., dist.Work | None], tensor: Tensor, peer: int
    ) -> dist.Work:
        with self.naming(what):
            work = start(tensor.detach(), self._global_ranks[peer], group=self.group)
        assert work is not None
        return work

    def _post_batch(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        """One NCCL launch; `wait` orders the current stream after it and does not stop the host."""
        ops = [self._op(dist.irecv, message) for message in recvs]
        ops += [self._op(dist.isend, message) for message in sends]
        peers = sorted({peer for peer, _ in (*sends, *recvs)})
        what = f"{label!r}, the messages from and to ranks {peers}"
        with self.naming(what):
            works = dist.batch_isend_irecv(ops) if ops else []
        return _GroupPending(self, [(what, work) for work in works], keep=ops)

    def _op(self, start: Callable[..., dist.Work | None], message: Message) -> dist.P2POp:
        peer, tensor = message
        return dist.P2POp(start, tensor.detach(), self._global_ranks[peer], group=self.group)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of the library, which name an address at best, with ranks and label."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: {what} failed: {error}"
            ) from error


class _GroupPending(Pending):
    def __init__(
        self, comm: GroupComm, works: list[tuple[str, dist.Work]], keep: object = None
    ) -> None:
        self.comm, self.works = comm, works
        self.keep = keep  # buffers stay alive until waited for

    def wait(self) -> None:
        for what, work in self.works:
            with self.comm.naming(what):
                work.wait()
        self.works, self.keep = [], None
