"""An mpi4py communicator as a communicator: tensors are sent from their memory, without a copy."""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor

from wf_backends.comm.faults import LEFT, deferred_termination, job_board
from wf_backends.comm.protocol import (
    CONTROL,
    DEFAULT_TIMEOUT_S,
    UNUSED_TAG,
    Message,
    Pending,
    Staged,
    Wait,
)
from wf_backends.comm.watch import ProcessComm

if TYPE_CHECKING:
    from mpi4py import MPI

POLLS_BEFORE_PAUSES = 1000  # then a waiting rank pauses between polls, for other threads' sake
PAUSE_S = 20e-6  # seconds between polls after that
MAX_MESSAGE = 1 << 30  # bytes; older libraries count them in 32 bits. Larger tensors are cut
CHECK_S = 0.5  # seconds between checks whether the peer has ended
ENDED_TAG = UNUSED_TAG  # of the empty message that a rank sends when it ends


class MpiComm(ProcessComm):
    """A communicator over a duplicate of an MPI communicator, apart from the program's messages.

    Making it is a collective operation. Large messages progress only inside MPI's calls: to overlap
    them with compute, call `poll()` of what `post` returned between two kernels. Waits poll, until
    the timeout or until the peer has ended, since nothing ends a wait inside MPI.

    Args:
        comm: an mpi4py intracommunicator.
        timeout: seconds that a wait waits.

    Raises:
        ValueError: if `comm` is COMM_NULL or an intercommunicator.
        RuntimeError: if the other ranks do not make theirs within the timeout.
    """

    on_host = True
    needs_polls = True

    def __init__(self, comm: MPI.Comm, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        from mpi4py import MPI  # loaded already: `comm` is of it

        self.MPI: Any = MPI
        if comm == self.MPI.COMM_NULL or comm.Is_inter():
            raise ValueError(f"group must be an MPI intracommunicator of this process, got {comm}")
        world, group = self.MPI.COMM_WORLD.Get_group(), comm.Get_group()
        ranks = group.Translate_ranks(None, world)
        super().__init__(comm.Get_rank(), len(ranks), ranks)
        self.timeout = timeout
        self.cuda_aware = _cuda_aware(self.MPI)
        self.comm, request = comm.Idup()
        board = job_board()
        for is_check_due in polls(timeout):
            if request.Test():
                break
            ended = board.read(LEFT, 0) if board and is_check_due else None
            if board and board.gone:
                ended = 0  # whose store it was
            if ended in self.global_ranks:
                raise RuntimeError(f"{self.me}: rank {ended} has ended and did not meet the others")
        else:
            raise RuntimeError(f"{self.me}: the meeting of all ranks did not end in {timeout:g} s")
        atexit.register(_call_if_alive, WeakMethod(self.leave))
        self.start_watch()

    def leave(self) -> None:
        """Tell all peers that this rank ends and sends nothing more."""
        for peer in range(self.size):
            if peer != self.rank and not self.MPI.Is_finalized():
                self.comm.Isend([b"", 0, self.MPI.BYTE], peer, ENDED_TAG)

    def carries(self, device: torch.device) -> bool:
        return device.type == "cpu" or self.cuda_aware

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        devices = {tensor.device for _, tensor in (*sends, *recvs)} - {torch.device("cpu")}
        if devices and not self.cuda_aware:
            return Staged(self._post_direct, label, sends, recvs)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()  # MPI ignores streams
        return self._post_direct(label, sends, recvs)

    def _post_direct(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        requests: list[_MpiRequest] = []
        tag, mpi = CONTROL.get(label, self.tag), self.comm
        receiving, sending = ("message from", mpi.Irecv, recvs), ("message to", mpi.Isend, sends)
        for transfer, start, messages in (receiving, sending):
            for peer, tensor in messages:
                data = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                for part in data.split(MAX_MESSAGE):  # an empty tensor has one empty part
                    try:
                        request = start([part, part.numel(), self.MPI.BYTE], peer, tag)
                    except self.MPI.Exception as error:
                        raise self.failed(label, transfer, peer, error) from error
                    num_bytes = part.numel() if messages is recvs else None
                    requests.append(_MpiRequest(transfer, peer, request, num_bytes, part))
        return _MpiPending(self, label, requests)


class _MpiRequest(NamedTuple):
    """One MPI request."""

    transfer: str
    peer: int
    request: MPI.Request
    num_bytes: int | None  # expected by a receive; None for a send
    buffer: Tensor  # stays alive until the request is done


@dataclass(eq=False)
class _MpiPending(Pending):
    comm: MpiComm
    label: str
    requests: list[_MpiRequest]
    orphan: _MpiRequest | None = None  # the first request, if its peer had ended at the last check

    def poll(self) -> None:
        self.requests = [request for request in self.requests if not self._is_done(request)]

    def wait(self) -> None:
        self.poll()
        if not self.requests:
            return
        comm, since = self.comm, time.monotonic()
        with deferred_termination() as termination:
            while self.requests:
                first = self.requests[0]
                comm.running_wait = Wait(
                    comm.current_pass, self.label, first.transfer, first.peer, since
                )
                for is_check_due in polls(comm.timeout):
                    self.poll()
                    if not self.requests or self.requests[0] is not first:
                        break
                    if termination.requested:
                        raise self._failed(first, "the launcher ends the job")
                    if is_check_due:
                        self._check_peer()
                else:
                    raise self._failed(first, f"it did not end within {comm.timeout:g} s")
        comm.running_wait = None

    def _failed(self, request: _MpiRequest, error: object) -> RuntimeError:
        return self.comm.failed(self.label, request.transfer, request.peer, error)

    def _check_peer(self) -> None:
        """Raise if the peer had ended at the last check: its earlier messages would be here."""
        first, comm = self.requests[0], self.comm
        if comm.verdict:
            raise self._failed(first, comm.verdict)
        if self.orphan is first:
            error = f"{comm.name_of(first.peer)} has ended and sends nothing more"
            raise self._failed(first, error)
        self.orphan = first if comm.comm.Iprobe(first.peer, ENDED_TAG) else None

    def _is_done(self, request: _MpiRequest) -> bool:
        status = self.comm.MPI.Status()
        try:
            if not request.request.Test(status):
                return False
        except self.comm.MPI.Exception as error:
            raise self._failed(request, error) from error
        expected = request.num_bytes
        if expected is not None and status.Get_count() != expected:
            raise self._failed(request, f"it has {status.Get_count()} bytes, expected {expected}")
        return True


def polls(timeout: float) -> Iterator[bool]:
    """A moment for each poll within `timeout` seconds: about every CHECK_S one that is True."""
    now = time.monotonic()
    deadline, next_check, is_check_due = now + timeout, now + CHECK_S, False
    for num_polls in count():
        yield is_check_due
        now = time.monotonic()
        if now > deadline:
            return
        is_check_due = now > next_check
        if is_check_due:
            next_check = now + CHECK_S
        time.sleep(PAUSE_S if num_polls > POLLS_BEFORE_PAUSES else 0)


def _call_if_alive(method: WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object was deleted."""
    if bound_method := method():
        bound_method()


def _cuda_aware(MPI: Any) -> bool:
    """Whether the MPI library can read device memory; False where it has no such query."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False
