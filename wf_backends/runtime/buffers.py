"""Buffers of rows: how rows are packed, put back and summed.

Buffers are rows-first: dimension 0 counts rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import starmap
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends.schedule import Ranges

Tensors = tuple[Tensor, ...]
Combine = Callable[[Iterable[Tensor], Iterable[Tensor]], None]
"""Folds values of some rows into buffers of these rows, in place."""


def pack(buffer: Tensor, rows: Ranges) -> Tensor:
    """The rows in the slices, one after another; the buffer or a view of it if there is one."""
    if len(rows) == 1:
        ((start, stop),) = rows
        return buffer if stop - start == buffer.size(0) else buffer[start:stop]
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


def empty_rows(num_rows: int, like: Tensors) -> Tensors:
    """Buffers of so many rows whose values will be written."""
    return tuple([x.new_empty((num_rows, *x.shape[1:])) for x in like])


class Accumulators(NamedTuple):
    """What one side of a pass collects: the tensors' shapes beyond the rows, how they add up.

    `starts` are their values before anything was added, one for each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[float, ...]
    dtype: torch.dtype
    device: torch.device
    combine: Combine

    def prepare(self, num_rows: int, blank: Ranges) -> Tensors:
        """Buffers whose rows in `blank` are ready to be added to; the others will be written."""
        like = {"dtype": self.dtype, "device": self.device}
        buffers = tuple([torch.empty((num_rows, *shape), **like) for shape in self.shapes])
        for start, stop in blank:
            for buffer, value in zip(buffers, self.starts, strict=True):
                buffer[start:stop] = value
        return buffers

    def blank(self, num_rows: int) -> Tensors:
        """Buffers of rows to which nothing was added yet."""
        return self.prepare(num_rows, ((0, num_rows),))


class Total:
    """What several ranks found for this rank's own rows, added up."""

    def __init__(self, num_rows: int, found: Accumulators) -> None:
        self._num_rows, self._found = num_rows, found
        self._buffers: Tensors | None = None

    def add(self, rows: Ranges, values: Tensors) -> None:
        """Add what one rank found; the first that covers all rows is taken as it is."""
        if self._buffers is None and (not values or values[0].size(0) == self._num_rows):
            self._buffers = values
        else:
            scatter(self.buffers(), self._found.combine, rows, values)

    def buffers(self) -> Tensors:
        """What was added so far."""
        if self._buffers is None:
            self._buffers = self._found.blank(self._num_rows)
        return self._buffers
