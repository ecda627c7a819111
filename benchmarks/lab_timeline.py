"""The phases of a step: when each batch of messages had arrived on all ranks, and predictions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from wf_backends.comm import Communicator, Message, Pending
from wf_backends.planner import Plan


class Timeline(Communicator):
    """Wraps a communicator; records the time at which each batch of messages has arrived."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.inner = comm
        self.on_host = comm.on_host
        self.arrivals: dict[str, float] = {}
        """Time of the last arrival by label, in seconds of the machine's clock."""
        self.recording = False  # True within a step
        self.start_time = self.stop_time = 0.0

    def start(self) -> None:
        self.arrivals = {}
        self.recording = True
        self.start_time = time.monotonic()

    def stop(self) -> None:
        self.stop_time = time.monotonic()
        self.recording = False

    @property
    def seconds(self) -> float:
        return self.stop_time - self.start_time

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return _RecordedPending(self.inner._post(label, sends, recvs), label, self)

    def record(self, label: str) -> None:
        if self.recording:
            self.arrivals[label] = time.monotonic()


class _RecordedPending(Pending):
    def __init__(self, inner: Pending, label: str, timeline: Timeline) -> None:
        self.inner = inner
        self.label = label
        self.timeline = timeline

    def wait(self) -> None:
        self.inner.wait()
        self.timeline.record(self.label)

    def poll(self) -> None:
        self.inner.poll()


def measured_phases(timeline: Timeline) -> dict[str, float]:
    """Seconds of each phase by label; a phase ends when the slowest rank has all its messages.

    What follows the last message is "rest". All ranks must run on one machine, as their clocks are
    compared.
    """
    record = (timeline.start_time, timeline.arrivals, timeline.stop_time)
    records: list[tuple[float, dict[str, float], float]] = [record] * timeline.size
    dist.all_gather_object(records, record)
    ends: dict[str, float] = {}
    for _, arrivals, _ in records:
        for label, arrival in arrivals.items():
            ends[label] = max(arrival, ends.get(label, arrival))
    ends["rest"] = max(stop for *_, stop in records)
    previous = min(start for start, *_ in records)
    phases: dict[str, float] = {}
    for label, end in sorted(ends.items(), key=lambda item: item[1]):
        phases[label] = end - previous
        previous = end
    return phases


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Seconds of a plan's phases by label, on the rank that ends last."""
    phases: dict[str, float] = {}
    for part in (plan.around, plan.forward, plan.backward):
        previous, label = 0.0, ""
        for span in sorted(part.spans, key=lambda span: span.stop):
            label = span.label
            if label.startswith("ulysses"):  # `around` has the forward's, then the backward's
                label = f"forward {label}"
                if label in phases:
                    label = label.replace("forward", "backward")
            phases[label] = phases.get(label, 0.0) + span.stop - previous
            previous = span.stop
        if label:  # time without a span on this rank, such as exchanges of other chunks of heads
            phases[label] += part.seconds - previous
    return phases
