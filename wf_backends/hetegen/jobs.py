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
PHASES: tuple[Phase, ...] = ("decode", "prefill")
LaneName = Literal["link", "host", "accelerator"]
LANE_NAMES: tuple[LaneName, ...] = ("link", "host", "accelerator")


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that may be split by its output rows.

    Attributes:
        name: of its module.
        rows, columns: output and input features.
        itemsize: bytes of an element.
        expert: the expert it belongs to, an empty string for none.
        routed: the share of the tokens that are routed to it.
    """

    name: str
    rows: int
    columns: int
    itemsize: int
    expert: str = ""
    routed: float = 1.0

    @property
    def row_bytes(self) -> int:
        return self.columns * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def uses(self, tokens: int) -> float:
        """How likely any of `tokens` tokens uses it."""
        return 1 - (1 - self.routed) ** tokens


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a linear:  [ resident | streamed | the host's ], the last two by phase."""

    linear: Linear
    resident: int
    streamed_decode: int
    streamed_prefill: int

    def streamed(self, phase: Phase) -> int:
        return self.streamed_decode if phase == "decode" else self.streamed_prefill

    def host_start(self, phase: Phase) -> int:
        """The first row of the host's."""
        return self.resident + self.streamed(phase)

    def alpha(self, phase: Phase) -> float:
        """The share of the rows that the host computes."""
        return 1 - self.host_start(phase) / self.linear.rows


@dataclass(frozen=True, slots=True)
class Job:
    """Rows [start, stop) of a linear, for one lane.

    It comes after the job before it that has its slab: rows are computed when they were copied,
    and a slab is written when it was read.

    Attributes:
        lane: "link" copies the rows to a slab; "host" computes them where they lie;
            "accelerator" computes them from a slab, or resident ones.
        slab: None for no slab.
    """

    lane: LaneName
    linear: int
    start: int
    stop: int
    slab: int | None = None


class JobMaker:
    """Makes the jobs of one call after the other, and keeps what is in the slabs.

    Which linear follows which is first taken from their order, then learned from the calls. A
    wrong guess costs copies in vain and nothing else. Experts are used as they are routed: copies
    run on neither into one nor out of it.

    Attributes:
        first: the linear with which a pass begins, None before the first call.
    """

    def __init__(self, splits: Sequence[Split], slabs: int, slab_bytes: int) -> None:
        self._splits, self._slab_bytes = splits, slab_bytes
        self._free: deque[int | None] = deque(range(slabs))
        self._ahead: deque[Job] = deque()  # copies whose rows are in slabs, or will be
        self._next = [(i + 1) % len(splits) for i in range(len(splits))]  # linear that follows
        self.first: int | None = None
        self._last: int | None = None  # that was called
        self._cursor: tuple[int, int, Phase] | None = None  # linear, row: where copying goes on

    def call(self, linear: int, phase: Phase) -> list[Job]:
        """The jobs of a call of `linear`, whose input is there, then copies for calls to come."""
        self.first = linear if self.first is None else self.first
        if self._last is not None:
            self._next[self._last] = linear
        self._last = linear
        split = self._splits[linear]
        if self._cursor is not None and self._cursor[0] == linear:
            self._cursor = (linear, self._cursor[1], phase)  # its copies were begun for a guess
        end, rows = max(self._copied(linear), split.host_start(phase)), split.linear.rows
        jobs: list[Job] = []
        if end < rows:
            jobs.append(Job("host", linear, end, rows))
        if split.resident:
            jobs.append(Job("accelerator", linear, 0, split.resident))
        row = split.resident
        while row < end:
            row = self._compute_piece(jobs, linear, row, phase)
        return sorted(jobs, key=lambda job: job.lane == "link" and job.linear != linear)

    def _following(self, linear: int) -> int | None:
        """The linear after `linear`; None if it is not of the same expert, or of none as well."""
        found = self._next[linear]
        same = self._splits[found].linear.expert == self._splits[linear].linear.expert
        return found if same else None

    def _copied(self, linear: int) -> int:
        """The row up to which those of `linear` are in slabs, or will be."""
        row = self._splits[linear].resident
        for copy in self._ahead:
            if (copy.linear, copy.start) != (linear, row):
                break
            row = copy.stop
        return row

    def _compute_piece(self, jobs: list[Job], linear: int, row: int, phase: Phase) -> int:
        """Compute the rows from `row` on that one slab holds, and refill it; the row after them."""
        if not self._ahead or (self._ahead[0].linear, self._ahead[0].start) != (linear, row):
            self._free.extend(copy.slab for copy in self._ahead)
            self._ahead.clear()
            self._cursor = (linear, row, phase)
            self._copy_on(jobs)
        copy = self._ahead.popleft()
        jobs.append(Job("accelerator", linear, row, copy.stop, copy.slab))
        self._free.append(copy.slab)
        self._copy_on(jobs)
        return copy.stop

    def _copy_on(self, jobs: list[Job]) -> None:
        """Fill all free slabs with the rows that are needed next."""
        while self._free and (piece := self._next_piece()):
            copy = Job("link", *piece, self._free.popleft())
            jobs.append(copy)
            self._ahead.append(copy)

    def _next_piece(self) -> tuple[int, int, int] | None:
        """(linear, start, stop) of the piece at the cursor, which moves on; None before experts."""
        if self._cursor is None:
            return None
        linear, row, phase = self._cursor
        for _ in range(len(self._splits) + 1):
            split = self._splits[linear]
            end = split.host_start(phase)
            if row < end:
                stop = min(row + self._slab_bytes // split.linear.row_bytes, end)
                self._cursor = (linear, stop, phase)
                return linear, row, stop
            following = self._following(linear)
            if following is None:
                break
            linear, row = following, self._splits[following].resident
            phase = "decode" if linear == self.first else phase
        self._cursor = None
        return None
