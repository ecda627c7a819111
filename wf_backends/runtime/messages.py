"""Rows of buffers, and the messages that carry the parcels of a program.

Buffers are rows-first: dimension 0 counts rows, and a message carries whole rows. `pack` and
`scatter` read and write some rows of a buffer, `Accumulators` and `Total` sum partial results, and
`Messages` sends and receives rows.
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
from wf_backends.lowering import Parcels
from wf_backends.schedule import Ranges

_NO_SPAN = nullcontext()

Tensors = tuple[Tensor, ...]
Dtypes = tuple[torch.dtype, ...]
Combine = Callable[[Iterable[Tensor], Iterable[Tensor]], None]
"""combine(targets, values): fold each value into its target of the same rows, in place."""
PutRows = Callable[[Ranges, Tensors], None]
"""put(rows, values): put the values of these rows, packed as in `pack`, into some buffers."""


def rows_first(x: Tensor) -> Tensor:
    """(b, s, ...) -> (s, b, ...)."""
    return x.transpose(0, 1)


def batch_first(x: Tensor) -> Tensor:
    """(s, b, ...) -> (b, s, ...)."""
    return x.transpose(0, 1)


def dense(x: Tensor) -> Tensor:
    """x (..., d), contiguous in its last dimension, as kernels assume without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fuse(k: Tensor, v: Tensor) -> Tensor:
    """[K|V], so that one message carries both: (b, s, g, d), (b, s, g, e) -> (s, b, g, d + e)."""
    return torch.cat((rows_first(k), rows_first(v)), dim=-1).contiguous()


def unfuse(kv: Tensor, head_dim: int) -> Tensors:
    """The two parts of [K|V] or [dK|dV], as views; `head_dim` is the last dimension of K."""
    return kv.split_with_sizes((head_dim, kv.size(-1) - head_dim), -1)


def pack(buffer: Tensor, rows: Ranges) -> Tensor:
    """The rows of the ranges, one after another; for one range a view, or the buffer itself."""
    if len(rows) == 1:
        ((start, stop),) = rows
        return buffer if stop - start == buffer.size(0) else buffer.narrow(0, start, stop - start)
    pieces = map(buffer.__getitem__, starmap(slice, rows))
    return torch.cat(tuple(pieces)) if rows else buffer[:0]


def scatter(buffers: Tensors, combine: Combine, rows: Ranges, values: Tensors) -> None:
    """Combine values, packed as in `pack`, into these rows of the buffers."""
    if len(rows) == 1:
        combine([pack(buffer, rows) for buffer in buffers], values)
        return
    packed_start = 0
    for start, stop in rows:
        packed_stop = packed_start + stop - start
        targets = map(itemgetter(slice(start, stop)), buffers)
        combine(targets, map(itemgetter(slice(packed_start, packed_stop)), values))
        packed_start = packed_stop


def copy(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by overwriting."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def add(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by summing."""
    for target, value in zip(targets, values, strict=True):
        target.add_(value)


def empty_rows(num_rows: int, templates: Tensors, dtypes: Dtypes | None = None) -> Tensors:
    """Uninitialised buffers like the templates, but of `num_rows` rows and, if given, `dtypes`."""
    pairs = zip(templates, dtypes or repeat(None), strict=False)
    return tuple([x.new_empty((num_rows, *x.shape[1:]), dtype=dtype) for x, dtype in pairs])


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What out, lse, dq, dk, dv are summed in: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Accumulators(NamedTuple):
    """The form of the buffers in which one side of a pass sums its results."""

    shapes: tuple[tuple[int, ...], ...]  # of a row, for each buffer
    starts: tuple[float, ...]  # the value before anything was added, for each buffer
    dtype: torch.dtype
    device: torch.device
    combine: Combine
    message_dtypes: Dtypes | None = None  # of partial results, for each buffer; None = `dtype`

    def prepare(self, num_rows: int, blank: Ranges) -> Tensors:
        """New buffers, with start values in the rows `blank`; tiles overwrite the other rows."""
        options = {"dtype": self.dtype, "device": self.device}
        buffers = tuple([torch.empty((num_rows, *shape), **options) for shape in self.shapes])
        for start, stop in blank:
            for buffer, value in zip(buffers, self.starts, strict=True):
                buffer[start:stop] = value
        return buffers


class Total:
    """The sum of all ranks' results for this rank's own rows."""

    def __init__(self, num_rows: int, accumulators: Accumulators) -> None:
        self._num_rows, self._accumulators = num_rows, accumulators
        self._buffers: Tensors | None = None

    def add(self, rows: Ranges, values: Tensors) -> None:
        """Add the results of one rank. If the first ones cover all rows, they are not copied, but
        as a part of a larger buffer, which they would keep in memory, until the backward."""
        if self._buffers is None and (not values or values[0].size(0) == self._num_rows):
            dtype = self._accumulators.dtype
            self._buffers = tuple([x.to(dtype, copy=_is_part(x)) for x in values])
        else:
            scatter(self.buffers(), self._accumulators.combine, rows, values)

    def buffers(self) -> Tensors:
        """The sum so far."""
        if self._buffers is None:
            self._buffers = self._accumulators.prepare(self._num_rows, ((0, self._num_rows),))
        return self._buffers


def _is_part(x: Tensor) -> bool:
    """Whether x is a view of a part of its memory."""
    return x.untyped_storage().nbytes() > x.nbytes


def span(activity: str, label: str) -> AbstractContextManager[object]:
    """A span in the profile. Without a profiler nothing: a span costs as much as a kernel call."""
    profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return record_function(f"wallfacer {activity} {label}") if profiled else _NO_SPAN


class Messages:
    """Messages that are posted together and waited for together.

    Args:
        label: names the messages in byte counts, profiles and errors.
        in_flight: a list that holds all `Messages` that were posted and not yet waited for.
    """

    def __init__(
        self, comm: Communicator, label: str, in_flight: list[Messages] | None = None
    ) -> None:
        self.comm, self.label = comm, label
        self._in_flight = [] if in_flight is None else in_flight
        self._sends: list[Message] = []
        self._recvs: list[Message] = []
        self.to_self: list[Tensors] = []  # the rows of parcels to this rank, until received
        self._arrivals: list[tuple[PutRows, Ranges, Tensors]] = []
        self._pending: Pending | None = None

    def send(self, parcels: Parcels, buffers: Tensors, dtypes: Dtypes | None = None) -> None:
        """Add the parcels' rows of every buffer to the sends; a parcel to this rank is kept.

        Args:
            dtypes: in which the rows are sent, for each buffer; None = the buffers'.
        """
        for parcel in parcels:
            packed = [pack(buffer, parcel.rows) for buffer in buffers]
            if parcel.peer == self.comm.rank:
                self.to_self.append(tuple(packed))
                continue
            for rows in packed if dtypes is None else map(Tensor.to, packed, dtypes):
                self._sends.append((parcel.peer, rows))

    def receive(self, parcels: Parcels, buffers: Tensors) -> None:
        """Add the parcels' rows of every buffer to the receives."""
        for parcel in parcels:
            in_place = len(parcel.rows) == 1 and buffers and buffers[0].is_contiguous()
            if parcel.peer == self.comm.rank or not in_place:
                self.collect((parcel,), buffers, partial(scatter, buffers, copy))
                continue
            for buffer in buffers:
                self._recvs.append((parcel.peer, pack(buffer, parcel.rows)))

    def collect(
        self, parcels: Parcels, templates: Tensors, put: PutRows, dtypes: Dtypes | None = None
    ) -> None:
        """Receive the parcels' rows into new tensors, and call `put` on them in `wait`.

        Args:
            templates: tensors with the same row shapes.
            dtypes: in which the rows are sent, for each tensor; None = the templates'.
        """
        for parcel in parcels:
            if parcel.peer == self.comm.rank:
                values = self.to_self.pop(0)
            else:
                values = empty_rows(parcel.num_rows, templates, dtypes)
                for value in values:
                    self._recvs.append((parcel.peer, value))
            self._arrivals.append((put, parcel.rows, values))

    def post(self) -> Messages:
        """Start all sends and receives.

        Peers are ordered by the exclusive or of both ranks, so that ranks send to each other in
        pairs and not all to rank 0 first. Messages to one peer keep their order.
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
        """Let messages progress, where the library moves them only inside its calls."""
        if self._pending is not None:
            self._pending.poll()

    def wait(self) -> None:
        """Return when all rows have arrived and are in their buffers."""
        if self._pending is not None:
            with span("wait", self.label):
                self._pending.wait()
            self._pending = None
            self._in_flight.remove(self)
        for put, rows, values in self._arrivals:
            put(rows, values)
        self._arrivals = []
