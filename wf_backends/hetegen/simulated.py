"""The lanes in virtual time: when each job of some passes begins and ends, without doing it.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wf_backends.hetegen.jobs import Accel, Copy, Free, Host, Job, JobMaker, Join, Phase

LANES: tuple[str, ...] = ("link", "host", "accelerator")


def lane_of(job: Job) -> str | None:
    """The lane that does a job; None for one that takes no time of any."""
    return {Copy: "link", Host: "host", Accel: "accelerator"}.get(type(job))


@dataclass(slots=True)
class Done:
    """A job with the time of its lane that it took, in seconds."""

    job: Job
    start: float
    end: float


@dataclass(slots=True)
class Simulated:
    """Runs jobs in the order in which they come, each lane one after the other.

    Attributes:
        seconds: what a Copy, Host or Accel takes.
        call_seconds: what the caller takes for each Join on top.
        now: the caller's time.
        done: all jobs so far.
    """

    seconds: Callable[[Job], float]
    call_seconds: float = 0.0
    now: float = 0.0
    done: list[Done] = field(default_factory=list)
    _ends: dict[int, float] = field(default_factory=dict)
    _lanes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))

    def run(self, jobs: Iterable[Job]) -> None:
        """Take jobs at the caller's time; a Join moves it to the end of what it waits for."""
        for job in jobs:
            start = max([self.now, *(self._ends[number] for number in job.after)])
            end = start
            if lane := lane_of(job):
                start = max(start, self._lanes[lane])
                end = self._lanes[lane] = start + self.seconds(job)
            elif isinstance(job, Join):
                end = self.now = start + self.call_seconds
            elif isinstance(job, Free):
                end = max(self._ends[number] for number in job.after)
            self._ends[job.number] = end
            self.done.append(Done(job, start, end))


def run_passes(
    device: Simulated, maker: JobMaker, order: list[int], phases: Iterable[Phase]
) -> list[float]:
    """Call the linears in `order`, once for each of `phases`; the seconds of each pass."""
    took = []
    for phase in phases:
        start = device.now
        for linear in order:
            device.run(maker.call(linear, phase))
        took.append(device.now - start)
    return took
