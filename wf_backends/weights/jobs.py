"""What the lanes of a device do for the calls of split linears; and when, in virtual time.

Streamed rows pass through slabs, pieces of the accelerator's memory that are used in turn. Copies
run on: as soon as a slab is read, the rows that will be needed next are on their way into it, also
those of the next token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wf_backends.weights.plan import PHASES, Job, Linear, Phase, Plan


class JobMaker:
    """Makes the jobs of one call after the other, and keeps what is in the slabs.

    Which linear follows which is first taken from their order, then learned from the calls. A
    wrong guess costs copies in vain and nothing else. Experts are used as they are routed: copies
    run on neither into one nor out of it.

    Attributes:
        first: the linear with which the pass began; None: it begins with the next call.
    """

    def __init__(self, plan: Plan) -> None:
        self._splits, self._slab_bytes = plan.splits, plan.slab_bytes
        self._free: deque[int | None] = deque(range(plan.slabs))
        self._ahead: deque[Job] = deque()  # copies whose rows are in slabs, or will be
        self._next = [*range(1, len(plan.splits)), 0]  # the linear that follows
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
        while row < end:  # compute what one slab holds, and refill it
            if not self._ahead or (self._ahead[0].linear, self._ahead[0].start) != (linear, row):
                self._free.extend(copy.slab for copy in self._ahead)  # a wrong guess
                self._ahead.clear()
                self._cursor = (linear, row, phase)
                self._copy_on(jobs)
            copy = self._ahead.popleft()
            jobs.append(Job("accelerator", linear, row, copy.stop, copy.slab))
            self._free.append(copy.slab)
            self._copy_on(jobs)
            row = copy.stop
        return sorted(jobs, key=lambda job: job.lane == "link" and job.linear != linear)

    def _copied(self, linear: int) -> int:
        """The row up to which those of `linear` are in slabs, or will be."""
        row = self._splits[linear].resident
        for copy in self._ahead:
            if (copy.linear, copy.start) != (linear, row):
                break
            row = copy.stop
        return row

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
            linear = self._next[linear]
            if self._splits[linear].linear.expert != split.linear.expert:
                break
            row = self._splits[linear].resident
            phase = "decode" if linear == self.first else phase
        self._cursor = None
        return None


@dataclass(frozen=True, slots=True)
class Done:
    """A job with the time of its lane that it took, in seconds."""

    job: Job
    start: float
    end: float


class Simulated:
    """Runs the jobs of a plan in the order in which they come, each lane one after the other.

    Attributes:
        now: the caller's time.
        done: all jobs so far.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._maker = plan, JobMaker(plan)
        self.now = 0.0
        self.done: list[Done] = []
        self._free: defaultdict[object, float] = defaultdict(float)  # when a lane or slab is

    def run_pass(self, order: Iterable[int], phase: Phase) -> float:
        """Call the linears in `order`; the seconds that this takes."""
        begun = self.now
        for linear in order:
            computed = self.now
            for job in self._maker.call(linear, phase):
                used = [job.lane] if job.slab is None else [job.lane, job.slab]
                start = max(self.now, *(self._free[each] for each in used))
                end = start + self._plan.seconds_of(job, phase)
                self._free.update(dict.fromkeys(used, end))
                self.done.append(Done(job, start, end))
                if job.lane != "link":
                    computed = max(computed, end)
            self.now = computed + self._plan.rates.call_seconds
        return self.now - begun


def simulate(plan: Plan, phases: Sequence[Phase]) -> tuple[list[float], Simulated]:
    """The seconds of some passes in a row, and the jobs in virtual time."""
    device, request = Simulated(plan), plan.request
    orders = {phase: used_linears(request.linears, request.tokens(phase)) for phase in PHASES}
    return [device.run_pass(orders[phase], phase) for phase in phases], device


def used_linears(linears: Sequence[Linear], tokens: int) -> list[int]:
    """The linears that a pass calls, in order: of experts as many as are used on average."""
    order, due, drawn = list[int](), 0.5, {"": True}
    for i, linear in enumerate(linears):
        if linear.expert not in drawn:
            due += linear.uses(tokens)
            drawn[linear.expert] = due >= 1
            due -= drawn[linear.expert]
        if drawn[linear.expert]:
            order.append(i)
    return order
