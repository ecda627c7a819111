"""The jobs that the lanes of a device do for each call of a split linear, and their simulation.

Streamed rows pass through slabs: buffers in the accelerator's memory that are reused in turn. The
link prefetches: as soon as a slab has been read, the rows that are needed next are copied into it,
also rows for the next token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wf_backends.hetegen.weights.plan import PHASES, Job, Linear, Phase, Plan


class JobMaker:
    """Makes the jobs of one call after another, and keeps track of what is in the slabs.

    It prefetches for the linears that should be called next. Their order is first that of the plan,
    then learned from the calls; a wrong guess costs useless copies and nothing else. Routing is not
    known in advance: an expert is copied from its first call on, and nothing beyond its end.

    Attributes:
        first_linear: the first linear of the running pass; None: the next call begins a pass.
    """

    def __init__(self, plan: Plan) -> None:
        self._splits, self._slab_bytes = plan.splits, plan.slab_bytes
        self._free_slabs: deque[int | None] = deque(range(plan.slabs))
        self._prefetched: deque[Job] = deque()  # copies whose rows were not computed yet
        self._successors = [*range(1, len(plan.splits)), 0]  # linear -> the one called after it
        self.first_linear: int | None = None
        self._previous_linear: int | None = None  # that of the last call
        self._cursor: tuple[int, int, Phase] | None = None  # linear and row to copy next

    def make_jobs(self, linear: int, phase: Phase) -> list[Job]:
        """The jobs of a call of `linear`, in order; copies for later calls are the last ones."""
        self.first_linear = linear if self.first_linear is None else self.first_linear
        if self._previous_linear is not None:
            self._successors[self._previous_linear] = linear
        self._previous_linear = linear
        split = self._splits[linear]
        if self._cursor is not None and self._cursor[0] == linear:
            self._cursor = (linear, self._cursor[1], phase)  # its phase was a guess
        # Rows that were prefetched are computed on the accelerator, even if the phase was wrong.
        host_start = max(self._prefetched_stop(linear), split.host_start(phase))
        jobs: list[Job] = []
        if host_start < split.linear.rows:
            jobs.append(Job("host", linear, host_start, split.linear.rows))
        if split.resident:
            jobs.append(Job("accelerator", linear, 0, split.resident))
        row = split.resident
        while row < host_start:  # compute the rows of one slab, then refill it
            copy = self._prefetched[0] if self._prefetched else None
            if copy is None or (copy.linear, copy.start) != (linear, row):  # a wrong guess
                self._free_slabs.extend(copy.slab for copy in self._prefetched)
                self._prefetched.clear()
                self._cursor = (linear, row, phase)
                self._prefetch(jobs)
            copy = self._prefetched.popleft()
            jobs.append(Job("accelerator", linear, row, copy.stop, copy.slab))
            self._free_slabs.append(copy.slab)
            self._prefetch(jobs)
            row = copy.stop
        return sorted(jobs, key=lambda job: job.lane == "link" and job.linear != linear)

    def _prefetched_stop(self, linear: int) -> int:
        """The end of the rows of `linear` that are resident or prefetched."""
        row = self._splits[linear].resident
        for copy in self._prefetched:
            if (copy.linear, copy.start) != (linear, row):
                break
            row = copy.stop
        return row

    def _prefetch(self, jobs: list[Job]) -> None:
        """Add copies of the rows that are needed next to `jobs`, until no slab is free."""
        while self._free_slabs and (rows := self._next_rows()):
            copy = Job("link", *rows, self._free_slabs.popleft())
            jobs.append(copy)
            self._prefetched.append(copy)

    def _next_rows(self) -> tuple[int, int, int] | None:
        """(linear, start, stop) of the rows to copy next; the cursor moves behind them.

        None if no linear streams rows, or before the next of them an expert begins or ends.
        """
        if self._cursor is None:
            return None
        linear, row, phase = self._cursor
        for _ in range(len(self._splits) + 1):
            split = self._splits[linear]
            host_start = split.host_start(phase)
            if row < host_start:
                stop = min(row + self._slab_bytes // split.linear.row_bytes, host_start)
                self._cursor = (linear, stop, phase)
                return linear, row, stop
            linear = self._successors[linear]
            if self._splits[linear].linear.expert != split.linear.expert:
                break
            row = self._splits[linear].resident
            phase = "decode" if linear == self.first_linear else phase  # of the next pass
        self._cursor = None
        return None


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job and when its lane begins and ends it, in seconds of virtual time."""

    job: Job
    start: float
    end: float


class SimulatedDevice:
    """Does the jobs of a plan in virtual time; every lane does its jobs one after another.

    Attributes:
        now: the caller's time in seconds.
        timed_jobs: all jobs so far.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._maker = plan, JobMaker(plan)
        self.now = 0.0
        self.timed_jobs: list[TimedJob] = []
        self._free_at: defaultdict[object, float] = defaultdict(float)  # lane or slab -> seconds

    def run_pass(self, order: Iterable[int], phase: Phase) -> float:
        """Call the linears in `order`; returns the seconds that this takes."""
        pass_start = self.now
        for linear in order:
            computed = self.now
            for job in self._maker.make_jobs(linear, phase):
                resources = [job.lane] if job.slab is None else [job.lane, job.slab]
                start = max(self.now, *(self._free_at[resource] for resource in resources))
                start += self._plan.rates.host_call_seconds if job.lane == "host" else 0.0
                end = start + self._plan.seconds_of(job, phase)
                self._free_at.update(dict.fromkeys(resources, end))
                self.timed_jobs.append(TimedJob(job, start, end))
                if job.lane != "link":
                    computed = max(computed, end)
            self.now = computed + self._plan.rates.call_seconds
        return self.now - pass_start


def simulate(plan: Plan, phases: Sequence[Phase]) -> tuple[list[float], SimulatedDevice]:
    """(seconds of each pass, the device) of passes of these phases, one after another."""
    device, request = SimulatedDevice(plan), plan.request
    orders = {phase: used_linears(request.linears, request.tokens(phase)) for phase in PHASES}
    return [device.run_pass(orders[phase], phase) for phase in phases], device


def used_linears(linears: Sequence[Linear], tokens: int) -> list[int]:
    """The linears that a pass calls, in order; of experts as many as are used on average."""
    order: list[int] = []
    is_used = {"": True}  # expert -> whether the pass uses it
    expected = 0.5  # experts that should be used and were not taken yet; 0.5 rounds to nearest
    for i, linear in enumerate(linears):
        if linear.expert not in is_used:
            expected += linear.use_probability(tokens)
            is_used[linear.expert] = expected >= 1
            if is_used[linear.expert]:
                expected -= 1
        if is_used[linear.expert]:
            order.append(i)
    return order
