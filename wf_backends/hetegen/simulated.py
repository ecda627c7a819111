"""The lanes in virtual time: when each job of some passes begins and ends, without doing it.

Pure: standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wf_backends.hetegen.jobs import PHASES, Job, Linear, Phase
from wf_backends.hetegen.plan import Plan


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
        self._plan, self._maker = plan, plan.job_maker()
        self.now = 0.0
        self.done: list[Done] = []
        self._free: defaultdict[object, float] = defaultdict(float)  # when a lane or slab is

    def run_pass(self, order: Iterable[int], phase: Phase) -> float:
        """Call the linears in `order`; the seconds that this takes."""
        start = self.now
        for linear in order:
            self.now = self._call(linear, phase) + self._plan.rates.call_seconds
        return self.now - start

    def _call(self, linear: int, phase: Phase) -> float:
        """Do the jobs of a call at the caller's time; when its rows are computed."""
        computed = self.now
        for job in self._maker.call(linear, phase):
            used = [job.lane] if job.slab is None else [job.lane, job.slab]
            start = max(self.now, *(self._free[each] for each in used))
            end = start + self._plan.seconds_of(job, phase)
            self._free.update(dict.fromkeys(used, end))
            self.done.append(Done(job, start, end))
            if job.lane != "link":
                computed = max(computed, end)
        return computed


def simulate(plan: Plan, phases: Sequence[Phase]) -> tuple[list[float], Simulated]:
    """The seconds of some passes in a row, and the jobs in virtual time."""
    device, request = Simulated(plan), plan.request
    orders = {phase: used_linears(request.linears, request.tokens(phase)) for phase in PHASES}
    return [device.run_pass(orders[phase], phase) for phase in phases], device


def used_linears(linears: Sequence[Linear], tokens: int) -> list[int]:
    """The linears that a pass calls, in order: of experts as many as are used on average."""
    order, due, drawn = [], 0.5, {"": True}
    for i, linear in enumerate(linears):
        if linear.expert not in drawn:
            due += linear.uses(tokens)
            drawn[linear.expert] = due >= 1
            due -= drawn[linear.expert]
        if drawn[linear.expert]:
            order.append(i)
    return order
