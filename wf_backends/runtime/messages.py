"""Rows of buffers and the messages that carry them: what a program's parcels mean for tensors.

Buffers are rows-first: dimension 0 counts rows, and a message carries whole rows. `pack` and
`scatter` read and write some rows, `Accumulators` and `Total` are where results are summed, and
`Messages` are rows on their way to other ranks and from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat, starmap
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from wf_backends.comm import Communicator, Message, Pending
from wf_backends.lowering import Parcel
from wf_backends.schedule import Ranges

SPAN = "wallfacer "
"""What the names of our spans in a profile of torch.profiler begin with."""

_NO_SPAN = nullcontext()

Tensors = tuple[Tensor, ...]
Dtypes = tuple[torch.dtype, ...]
Combine = Callable[[Iterable[Tensor], Iterable[Tensor]], None]
"""Folds values of some rows into buffers of these rows, in place."""
Place = Callable[[Ranges, Tensors], None]
"""Puts the values of some rows where they belong."""


def pack(buffer: Tensor, rows: Ranges) -> Tensor:
    """The rows in the slices, one after another; the buffer or a view of it if there is one."""
    if len(rows) == 1:
        ((start, stop),) = rows
        return buffer if stop - start == buffer.size(0) else buffer.narrow(0, start, stop - start)
    slices = map(buffer.__getitem__, starmap(slice, rows))
    return torch.cat(tuple(slices)) if rows else buffer[:0]


def scatter(buffers: Tensors, combine: Combine, rows: Ranges, values: Tensors) -> None:
    """Combine values, packed as in `pack`, into the slices of the buffers."""
    if len(rows) == 1:
        combine([pack(buffer, rows) for buffer in buffers], values)
        return
    at = 0
    for start, stop in rows:
        upto = at + stop - start
        here, there = itemgetter(slice(start, stop)), itemgetter(slice(at, upto))
        combine(map(here, buffers), map(there, values))
        at = upto


def copy(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by overwriting."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def add(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by summing."""
    for target, value in zip(targets, values, strict=True):
        target.add_(value)


def empty_rows(num_rows: int, like: Tensors, dtypes: Dtypes | None = None) -> Tensors:
    """Buffers of so many rows whose values will be written, in their own dtypes or in these."""
    pairs = zip(like, dtypes or repeat(None), strict=False)
    return tuple([x.new_empty((num_rows, *x.shape[1:]), dtype=dtype) for x, dtype in pairs])


class Accumulators(NamedTuple):
    """What one side of a pass collects: the tensors' shapes beyond the rows, how they add up.

    `starts` are their values before anything was added, and `wire` the dtypes in which they travel
    (None: as they are summed), one for each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[float, ...]
    dtype: torch.dtype
    device: torch.device
    combine: Combine
    wire: Dtypes | None = None

    def prepare(self, num_rows: int, blank: Ranges) -> Tensors:
        """New buffers, with start values in the rows `blank`; tiles overwrite the other rows."""
        like = {"dtype": self.dtype, "device": self.device}
        buffers = tuple([torch.empty((num_rows, *shape), **like) for shape in self.shapes])
        for start, stop in blank:
            for buffer, value in zip(buffers, self.starts, strict=True):
                buffer[start:stop] = value
        return buffers


class Total:
    """The sum of several ranks' results for this rank's own rows."""

    def __init__(self, num_rows: int, found: Accumulators) -> None:
        self._num_rows, self._found = num_rows, found
        self._buffers: Tensors | None = None

    def add(self, rows: Ranges, values: Tensors) -> None:
        """Add the results of one rank; the first that cover all rows are taken without a copy."""
        if self._buffers is None and (not values or values[0].size(0) == self._num_rows):
            self._buffers = tuple([x.to(self._found.dtype) for x in values])
        else:
            scatter(self.buffers(), self._found.combine, rows, values)

    def buffers(self) -> Tensors:
        """The sum so far."""
        if self._buffers is None:
            self._buffers = self._found.prepare(self._num_rows, ((0, self._num_rows),))
        return self._buffers


def span(what: str, label: str) -> AbstractContextManager[object]:
    """A span in the profile; none where no profiler runs: it costs as much as a kernel call."""
    watched = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return record_function(f"{SPAN}{what} {label}") if watched else _NO_SPAN


class Messages:
    """Messages that are posted together and waited for together.

    Args:
        label: of these messages in byte counts, profiles and errors.
        in_flight: where those that were posted and not yet waited for are listed.
    """

    def __init__(
        self, comm: Communicator, label: str, in_flight: list[Messages] | None = None
    ) -> None:
        self.comm, self.label = comm, label
        self._in_flight = [] if in_flight is None else in_flight
        self._sends: list[Message] = []
        self._recvs: list[Message] = []
        self.to_self: list[Tensors] = []
        self._arrivals: list[tuple[Place, Ranges, Tensors]] = []
        self._pending: Pending | None = None

    def send(self, parcel: Parcel, buffers: Tensors, dtypes: Dtypes | None = None) -> None:
        """Send the parcel's rows of every buffer, in these dtypes if they are given.

        A parcel to oneself is kept as it is.
        """
        peer, packed = parcel.peer, [pack(buffer, parcel.rows) for buffer in buffers]
        if peer == self.comm.rank:
            self.to_self.append(tuple(packed))
            return
        for rows in packed if dtypes is None else map(Tensor.to, packed, dtypes):
            self._sends.append((peer, rows))

    def receive(self, parcel: Parcel, buffers: Tensors) -> None:
        """Receive into the parcel's rows of the buffers."""
        peer, rows = parcel.peer, parcel.rows
        in_place = len(rows) == 1 and buffers and buffers[0].is_contiguous()
        if peer == self.comm.rank or not in_place:
            self.collect(parcel, buffers, partial(scatter, buffers, copy))
            return
        for buffer in buffers:
            self._recvs.append((peer, pack(buffer, rows)))

    def collect(
        self, parcel: Parcel, like: Tensors, place: Place, dtypes: Dtypes | None = None
    ) -> None:
        """Receive the parcel's rows of tensors like these, and place them once they are here.

        Args:
            dtypes: in which others send them, if not in those of `like`.
        """
        if parcel.peer == self.comm.rank:
            arriving = self.to_self.pop(0)
        else:
            arriving = empty_rows(parcel.num_rows, like, dtypes)
            for tensor in arriving:
                self._recvs.append((parcel.peer, tensor))
        self._arrivals.append((place, parcel.rows, arriving))

    def post(self) -> Messages:
        """Start everything.

        Peers take turns in pairs (by the exclusive or of their numbers), so that not every rank
        sends to rank 0 first. Messages of one peer keep their order.
        """
        if not (self._sends or self._recvs):
            return self
        sends = [(peer, tensor.contiguous()) for peer, tensor in self._sends]
        if len(sends) > 1 or len(self._recvs) > 1:
            rank = self.comm.rank
            sends.sort(key=lambda message: message[0] ^ rank)
            self._recvs.sort(key=lambda message: message[0] ^ rank)
        self._pending = self.comm.post(self.label, sends, self._recvs)
        self._in_flight.append(self)
        return self

    def poll(self) -> None:
        """Let messages make headway, where the library moves them only inside its calls."""
        if self._pending is not None:
            self._pending.poll()

    def wait(self) -> None:
        """Return when all rows are in their place."""
        if self._pending is not None:
            with span("wait", self.label):
                self._pending.wait()
            self._pending = None
            self._in_flight.remove(self)
        for place, rows, values in self._arrivals:
            place(rows, values)
        self._arrivals = []
