"""When every message of a step had landed, on all ranks, beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from wf_backends.comm import Communicator, Message, Pending
from wf_backends.planner import Plan


class Timeline(Communicator):
    """Another communicator, with the moment at which each of a step's mails had landed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.inner, self.on_host = comm, comm.on_host
        self.landed: dict[str, float] | None = None
        """Seconds of the machine's clock by label; None between steps."""
        self.began = self.ended = 0.0

    def start(self) -> None:
        self.landed, self.began = {}, time.monotonic()

    def stop(self) -> None:
        self.ended = time.monotonic()
        self.taken, self.landed = self.landed or {}, None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return _Noted(self.inner._post(label, sends, recvs), label, self)

    def note(self, label: str) -> None:
        if self.landed is not None:
            self.landed[label] = time.monotonic()


class _Noted(Pending):
    def __init__(self, inner: Pending, label: str, timeline: Timeline) -> None:
        self.inner, self.label, self.timeline = inner, label, timeline

    def wait(self) -> None:
        self.inner.wait()
        self.timeline.note(self.label)

    def poll(self) -> None:
        self.inner.poll()


def phases(timeline: Timeline) -> dict[str, float]:
    """Seconds from one label to the next, each when the slowest rank was through; then the rest.

    The clock is the machine's, so this needs all ranks on one.
    """
    told = (timeline.began, timeline.taken, timeline.ended)
    ranks: list[tuple[float, dict[str, float], float]] = [told] * timeline.size
    dist.all_gather_object(ranks, told)
    latest: dict[str, float] = {}
    for _, landed, _ in ranks:
        for label, at in landed.items():
            latest[label] = max(at, latest.get(label, at))
    latest["rest"] = max(ended for *_, ended in ranks)
    before, found = min(began for began, *_ in ranks), dict[str, float]()
    for label, at in sorted(latest.items(), key=lambda item: item[1]):
        found[label], before = at - before, at
    return found


def predicted(plan: Plan) -> dict[str, float]:
    """A plan's phases by the labels of their messages, as the rank sees them that ends last."""
    found: dict[str, float] = {}
    for one in (plan.around, plan.forward, plan.backward):
        before, label = 0.0, ""
        for span in sorted(one.spans, key=lambda span: span.stop):
            label = span.label
            if label.startswith("ulysses"):  # priced for both passes, the forward's first
                label = f"forward {label}"
                label = label if label not in found else label.replace("forward", "backward")
            found[label] = found.get(label, 0.0) + span.stop - before
            before = span.stop
        if label:  # what the rank does not see, such as exchanges of other chunks of heads
            found[label] += one.seconds - before
    return found
