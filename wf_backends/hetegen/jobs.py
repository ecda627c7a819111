"""What the lanes of a device do for one call of a split linear, as plain data.

Rows of a weight lie as  [ resident | streamed | the host's ].  Streamed rows pass through slabs,
pieces of the accelerator's memory that are used in turn. Copies run on: as soon as a slab is
read, the rows that will be needed next are on their way into it, also those of the next token.

Pure: standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do, after the jobs with the numbers `after`, which are all smaller ones."""

    number: int
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy(Job):
    """Link: rows [start, stop) of `linear` from host memory to a slab."""

    linear: int
    start: int
    stop: int
    slab: int


@dataclass(frozen=True, slots=True)
class Host(Job):
    """Host: compute rows [start, stop)."""

    linear: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Accel(Job):
    """Accelerator: compute rows [start, stop), which are in a slab, or resident (slab None)."""

    linear: int
    start: int
    stop: int
    slab: int | None


@dataclass(frozen=True, slots=True)
class Free(Job):
    """No lane: from here on the slab may be written again."""

    slab: int


@dataclass(frozen=True, slots=True)
class Join(Job):
    """Caller: all rows of the call are computed."""

    linear: int


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of one linear are split.

    Attributes:
        rows: all of them.
        resident: rows [0, resident) are in the accelerator's memory.
        streamed: phase -> how many rows follow that are streamed.
        piece: rows of one slab.
        expert: which expert it belongs to, an empty string for none. Experts are used as they
            are routed, so that copies do not run on into one.
    """

    rows: int
    resident: int
    streamed: dict[Phase, int]
    piece: int
    expert: str = ""

    def end(self, phase: Phase) -> int:
        """The first row of the host's."""
        return self.resident + self.streamed[phase]


class JobMaker:
    """Makes the jobs of one call after the other, and keeps what is in the slabs.

    Which linear follows which is first taken from their order, then learned from the calls.
    A wrong guess costs copies in vain and nothing else.
    """

    def __init__(self, linears: Sequence[Rows], slabs: int) -> None:
        self._linears = linears
        self._number = 0
        self._free: deque[tuple[int, int | None]] = deque((slab, None) for slab in range(slabs))
        self._ahead: deque[Copy] = deque()
        self._next = {i: (i + 1) % len(linears) for i in range(len(linears))}
        self.first: int | None = None  # linear of a pass
        self._last: int | None = None  # that was called
        self._cursor: tuple[int, int, Phase] | None = None  # linear, row: where copying goes on

    @property
    def oldest(self) -> int:
        """The least number that a later job may come after."""
        numbers = [job.number for job in self._ahead]
        numbers += [number for _, number in self._free if number is not None]
        return min(numbers, default=self._number)

    def call(self, linear: int, phase: Phase) -> list[Job]:
        """The jobs of a call of `linear`, whose input is there, and copies for calls to come."""
        self._learn(linear)
        rows = self._linears[linear]
        copied = rows.resident  # up to where rows are in slabs, or will be
        for copy in self._ahead:
            if (copy.linear, copy.start) != (linear, copied):
                break
            copied = copy.stop
        end = max(copied, rows.end(phase))
        if self._cursor is not None and self._cursor[0] == linear:
            self._cursor = (linear, self._cursor[1], phase)  # its copies were begun for a guess
        jobs: list[Job] = []
        if end < rows.rows:
            jobs.append(Host(self._new(), (), linear, end, rows.rows))
        if rows.resident:
            jobs.append(Accel(self._new(), (), linear, 0, rows.resident, None))
        row = rows.resident
        while row < end:
            row = self._compute_piece(jobs, linear, row, phase)
        work = tuple(job.number for job in jobs if isinstance(job, Host | Accel))
        jobs.append(Join(self._new(), work, linear))
        return jobs

    def _new(self) -> int:
        self._number += 1
        return self._number

    def _learn(self, linear: int) -> None:
        if self._last is not None:
            self._next[self._last] = linear
        if self.first is None:
            self.first = linear
        self._last = linear

    def _compute_piece(self, jobs: list[Job], linear: int, row: int, phase: Phase) -> int:
        """Compute the rows from `row` on that one slab holds, and refill it; the row after them."""
        if not self._ahead or (self._ahead[0].linear, self._ahead[0].start) != (linear, row):
            self._free.extend((copy.slab, copy.number) for copy in self._ahead)
            self._ahead.clear()
            self._cursor = (linear, row, phase)
            self._copy_on(jobs)
        copy = self._ahead.popleft()
        accel = Accel(self._new(), (copy.number,), linear, row, copy.stop, copy.slab)
        free = Free(self._new(), (accel.number,), copy.slab)
        jobs += accel, free
        self._free.append((copy.slab, free.number))
        self._copy_on(jobs)
        return copy.stop

    def _copy_on(self, jobs: list[Job]) -> None:
        """Fill all free slabs with the rows that are needed next."""
        while self._free and (piece := self._next_piece()):
            slab, number = self._free.popleft()
            copy = Copy(self._new(), () if number is None else (number,), *piece, slab)
            jobs.append(copy)
            self._ahead.append(copy)

    def _next_piece(self) -> tuple[int, int, int] | None:
        """(linear, start, stop) of the piece at the cursor, which moves on; None before experts."""
        if self._cursor is None:
            return None
        linear, row, phase = self._cursor
        for _ in range(len(self._linears) + 1):
            rows = self._linears[linear]
            if row < rows.end(phase):
                stop = min(row + rows.piece, rows.end(phase))
                self._cursor = (linear, stop, phase)
                return linear, row, stop
            linear = self._next[linear]
            following = self._linears[linear]
            if following.expert not in ("", rows.expert):
                break
            row = following.resident
            phase = "decode" if linear == self.first else phase
        self._cursor = None
        return None
