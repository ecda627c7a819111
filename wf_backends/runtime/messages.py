"""Rows of buffers in messages: what a plan's parcels mean for tensors.

Buffers are rows-first: dimension 0 counts rows, and a message carries whole rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from wf_backends.comm import Communicator, Message, Pending, exchange
from wf_backends.lowering import Gather, Parcel
from wf_backends.schedule import Ranges

SPAN = "wallfacer "
"""What the names of our spans in a profile of torch.profiler begin with."""

_NOWHERE = nullcontext()

Tensors = tuple[Tensor, ...]
Combine = Callable[[Tensors, Tensors], None]


def span(name: str) -> AbstractContextManager[object]:
    """A span in the profile, where somebody profiles: it costs as much as a kernel call."""
    watched = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return record_function(SPAN + name) if watched else _NOWHERE


class Mail:
    """The messages of one moment: collected, posted at once, waited for later."""

    def __init__(self, comm: Communicator, label: str) -> None:
        self.comm, self.label = comm, label
        self._sends: list[Message] = []
        self._recvs: list[Message] = []
        self._to_self: deque[Tensors] = deque()
        self._pending: Pending | None = None

    def send(self, parcel: Parcel | None, buffers: Tensors) -> None:
        """Send the parcel's rows of every buffer; a parcel to oneself is kept as it is."""
        if parcel is None:
            return
        packed = tuple(pack(buffer, parcel.rows) for buffer in buffers)
        if parcel.peer == self.comm.rank:
            self._to_self.append(packed)
        else:
            self._sends += [(parcel.peer, tensor) for tensor in packed]

    def land(self, parcel: Parcel, buffers: Tensors) -> Callable[[], None]:
        """Receive into the parcel's rows of the buffers; call the result after the wait."""
        if parcel.peer != self.comm.rank and len(parcel.rows) == 1:
            ((start, stop),) = parcel.rows
            self._recvs += [(parcel.peer, buffer[start:stop]) for buffer in buffers]
            return lambda: None
        arriving = self.receive(parcel, buffers)
        return lambda: scatter(buffers, parcel.rows, arriving, copy)

    def receive(self, parcel: Parcel | None, like: Tensors) -> Tensors:
        """Tensors that hold the parcel's rows once the mail was waited for."""
        if parcel is None:
            return tuple(tensor[:0] for tensor in like)
        if parcel.peer == self.comm.rank:
            return self._to_self.popleft()
        arriving = tuple(t.new_empty((parcel.num_rows, *t.shape[1:])) for t in like)
        self._recvs += [(parcel.peer, tensor) for tensor in arriving]
        return arriving

    def post(self) -> bool:
        """Start everything; whether there was anything to start.

        Peers take turns in pairs (by the exclusive or of their numbers), so that not every rank
        sends to rank 0 first. Messages of one peer keep their order.
        """

        def turn(message: Message) -> int:
            return message[0] ^ self.comm.rank

        if self._sends or self._recvs:
            sends = [(peer, x.contiguous()) for peer, x in sorted(self._sends, key=turn)]
            recvs = sorted(self._recvs, key=turn)
            self._pending = self.comm.post(self.label, sends, recvs)
        return self._pending is not None

    def poll(self) -> None:
        """Let messages make headway, where the library moves them only inside its calls."""
        if self._pending is not None:
            self._pending.poll()

    def wait(self) -> None:
        """Return when everything has landed."""
        if self._pending is not None:
            with span(f"wait {self.label}"):
                self._pending.wait()

    def deliver(self) -> None:
        """Start everything and return when it has landed."""
        for _ in self.arrivals():
            pass

    def arrivals(self) -> Iterator[int]:
        """Start everything in turns; every rank, as soon as what it sent is here, itself first.

        What is done between two of them is done while others' messages are on their way.
        """
        arriving = exchange(self.comm, self.label, self._sends, self._recvs)
        while True:
            with span(f"wait {self.label}"):
                rank = next(arriving, None)
            if rank is None:
                return
            yield rank


class Home:
    """The sum, or merge, of the partial results that come home to this rank's own rows."""

    def __init__(self, num_rows: int, blank: Callable[[int], Tensors], combine: Combine) -> None:
        self._num_rows, self._blank, self._combine = num_rows, blank, combine
        self._total: Tensors | None = None

    def add(self, parcel: Parcel, values: Tensors) -> None:
        """Fold in what one rank sent; the first that covers all rows is taken as it is."""
        if self._total is None and parcel.num_rows == self._num_rows:
            self._total = values
        else:
            scatter(self.total(), parcel.rows, values, self._combine)

    def total(self) -> Tensors:
        """What has come home so far."""
        if self._total is None:
            self._total = self._blank(self._num_rows)
        return self._total


def pack(buffer: Tensor, rows: Ranges) -> Tensor:
    """The rows in the slices, one after another; the buffer or a view of it if there is one."""
    if len(rows) == 1:  # Tensor.size: len() of a tensor is a call of Python
        start, stop = rows[0]
        return buffer[start:stop] if stop - start < buffer.size(0) else buffer
    return torch.cat([buffer[start:stop] for start, stop in rows]) if rows else buffer[:0]


def scatter(buffers: Tensors, rows: Ranges, values: Tensors, combine: Combine) -> None:
    """Combine values, packed as in `pack`, into the slices of the buffers."""
    if len(rows) == 1:
        combine(tuple(pack(buffer, rows) for buffer in buffers), values)
        return
    at = 0
    for start, stop in rows:
        upto = at + stop - start
        combine(tuple(b[start:stop] for b in buffers), tuple(v[at:upto] for v in values))
        at = upto


def copy(targets: Tensors, values: Tensors) -> None:
    """Combine by overwriting."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def add(targets: Tensors, values: Tensors) -> None:
    """Combine by summing."""
    for target, value in zip(targets, values, strict=True):
        target.add_(value)


def bring_together(mail: Mail, gather: Gather, shard: Tensors) -> Callable[[], Tensors]:
    """Register a gather's messages; the result gives the filled buffers after the wait."""
    for parcel in gather.give:
        mail.send(parcel, shard)
    if len(gather.take) == 1:
        whole = mail.receive(gather.take[0], shard)
        return lambda: whole
    buffers = tuple(t.new_empty((gather.num_rows, *t.shape[1:])) for t in shard)
    landing = [mail.land(parcel, buffers) for parcel in gather.take]

    def finish() -> Tensors:
        for land in landing:
            land()
        return buffers

    return finish


def send_home(mail: Mail, gather: Gather, partial: Tensors, home: Home) -> Callable[[], Tensors]:
    """Register the way back of a gather; the result gives the combined shard after the wait."""
    for parcel in gather.take:
        mail.send(parcel, partial)
    arriving = [(parcel, mail.receive(parcel, partial)) for parcel in gather.give]

    arriving.sort(key=lambda item: item[0].peer != mail.comm.rank)  # what is here already, first

    def finish() -> Tensors:
        for parcel, values in arriving:
            home.add(parcel, values)
        return home.total()

    return finish
