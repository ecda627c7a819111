"""The lanes in virtual time: when each job of some passes begins and ends, without doing it.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wf_backends.hetegen.jobs import LANE_NAMES, Job, JobMaker, Phase


@dataclass(frozen=True, slots=True)
class Done:
    """A job with the time of its lane that it took, in seconds."""

    job: Job
    start: float
    end: float


@dataclass(slots=True)
class Simulated:
    """Runs jobs in the order in which they come, each lane one after the other.

    Attributes:
        seconds: what a job of a lane takes in a phase.
        call_seconds: what the caller takes from the end of a call to the next.
        now: the caller's time.
        done: all jobs so far.
    """

    seconds: Callable[[Job, Phase], float]
    call_seconds: float = 0.0
    now: float = 0.0
    done: list[Done] = field(default_factory=list)
    _ends: dict[int, float] = field(default_factory=dict)
    _lanes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANE_NAMES, 0.0))

    def call(self, jobs: Iterable[Job], phase: Phase) -> None:
        """Take the jobs of a call at the caller's time, which its join moves on."""
        for job in jobs:
            start = max([self.now, *(self._ends[number] for number in job.after)])
            if job.lane == "join":
                end = self.now = start + self.call_seconds
            else:
                start = max(start, self._lanes[job.lane])
                end = self._lanes[job.lane] = start + self.seconds(job, phase)
            self._ends[job.number] = end
            self.done.append(Done(job, start, end))

    def run_pass(self, maker: JobMaker, order: Iterable[int], phase: Phase) -> float:
        """Call the linears in `order`; the seconds that this takes."""
        start = self.now
        for linear in order:
            self.call(maker.call(linear, phase), phase)
        return self.now - start
