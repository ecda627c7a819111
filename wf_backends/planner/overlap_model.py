"""When a pass computes and when its messages travel: two queues, of one rank and of its links.

Pure: standard library only. All figures are those of the busiest rank and of the busiest link, as
if all ranks kept step: what closed forms and pictures go by. Where every message is counted,
planner/simulator.py lets every rank and link go on as soon as it can.
Messages travel one after another in the order in which they are posted; the latency of one does
not hold up the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wf_backends.cluster import Topology


@dataclass(frozen=True, slots=True)
class Transfer:
    """Messages that are posted together: how long they keep the link busy, and the latency."""

    busy_s: float = 0.0
    latency_s: float = 0.0
    hold_s: float = 0.0
    """For how long they keep the rank from computing."""

    @property
    def seconds(self) -> float:
        """From the first byte to the arrival of the last."""
        return self.busy_s + self.latency_s

    def beyond(self, other: Transfer) -> Transfer:
        """What is left of this one once the other is through."""
        busy_s, hold_s = self.busy_s - other.busy_s, self.hold_s - other.hold_s
        return Transfer(max(0.0, busy_s), self.latency_s, max(0.0, hold_s))


NOTHING = Transfer()


def transfer(topology: Topology, inside_bytes: float, nic_bytes: float) -> Transfer:
    """Bytes through the busiest rank's connection in its host and through the busiest NIC."""
    near, far = topology.inside, topology.between
    longer = near.seconds(inside_bytes) > far.seconds(nic_bytes)
    link, num_bytes = (near, inside_bytes) if longer else (far, nic_bytes)
    if not num_bytes:
        return NOTHING
    each = inside_bytes + nic_bytes / topology.ranks_per_nic  # a rank sends, and receives as much
    hold_s = topology.hold_s(2 * each, messages=2)
    return Transfer(num_bytes / link.bytes_per_s, link.latency_s, hold_s)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tiles that wait for a fetch, and whose results leave."""

    compute_s: float
    fetch: Transfer = Transfer()
    leave: Transfer = Transfer()


@dataclass(frozen=True, slots=True)
class Phase:
    """A step: fetches and then a hop are posted, the chunks are computed, the hop has landed."""

    label: str
    hop: Transfer = Transfer()
    chunks: tuple[Chunk, ...] = ()
    times: int = 1
    """How many phases in a row are like this one."""

    @property
    def compute_s(self) -> float:
        return sum(chunk.compute_s for chunk in self.chunks)

    @property
    def transfer_s(self) -> float:
        """Everything that is posted in the phase, one after another."""
        around = sum(chunk.fetch.seconds + chunk.leave.seconds for chunk in self.chunks)
        return self.hop.seconds + around


@dataclass(frozen=True, slots=True)
class Span:
    """Something that goes on from `start` to `stop`, in seconds from the start of the pass."""

    label: str
    kind: str
    """compute or transfer."""
    start: float
    stop: float


class Clock:
    """Runs phases: `now` is the rank's time, `free` when the link has sent what was posted.

    Args:
        spans: where to note everything that goes on; None = nowhere.
        free: when the link has sent what was posted before the first phase.
    """

    def __init__(self, spans: list[Span] | None = None, free: float = 0.0) -> None:
        self.now = self.done = 0.0
        self.free = free
        self.spans = spans

    def run(self, phase: Phase) -> None:
        """One phase, once."""
        chunks = phase.chunks
        fetched = [self._post(f"{phase.label} fetch", chunk.fetch) for chunk in chunks]
        landed = self._post(phase.label, phase.hop)
        left = 0.0  # shares the link with what was posted before it
        for chunk, arrived in zip(chunks, fetched, strict=True):
            start = self.now = max(self.now, arrived + left if chunk.fetch.busy_s else 0.0)
            self.now += chunk.compute_s
            self._note(phase.label, "compute", start, self.now)
            if chunk.leave.busy_s:
                self.done = max(self.done, self._post(f"{phase.label} home", chunk.leave))
                left += chunk.leave.busy_s
        self.now = max(self.now, landed + left if phase.hop.busy_s else 0.0)

    def repeat(self, phase: Phase) -> None:
        """A phase as many times as it says; from the second on each takes as long as that one."""
        before = self.now
        for _ in range(min(2, phase.times)):
            before = self.now
            self.run(phase)
        rest = max(0, phase.times - 2) * (self.now - before)
        self.now, self.free = self.now + rest, self.free + rest

    def _post(self, label: str, what: Transfer) -> float:
        """When it has arrived."""
        if not what.busy_s:
            return self.now
        start = max(self.now, self.free)
        self.free = start + what.busy_s
        self.now += what.hold_s
        arrived = self.free + what.latency_s
        self._note(label, "transfer", start, arrived)
        return arrived

    def _note(self, label: str, kind: str, start: float, stop: float) -> None:
        if self.spans is not None and stop > start:
            self.spans.append(Span(label, kind, start, stop))


def seconds(phases: Iterable[Phase], free: float = 0.0) -> float:
    """How long the phases take in a row, if the link is free from then on."""
    clock = Clock(free=free)
    for phase in phases:
        clock.repeat(phase)
    return max(clock.now, clock.done)


def spans(phases: Iterable[Phase]) -> list[Span]:
    """Everything that goes on, phase by phase, repeated ones too."""
    clock = Clock(found := [])
    for phase in phases:
        for _ in range(phase.times):
            clock.run(phase)
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """What one or several passes cost."""

    phases: tuple[Phase, ...]
    nic_bytes: float
    """Through the busiest NIC, one way."""
    inside_bytes: float
    """Through the busiest rank's connection inside its host, one way."""
    memory_bytes: float
    """Of buffers beyond what the caller holds, at their peak, on the rank with the most."""
    gathered_bytes: float = 0.0
    """Of those, queries and keys that a forward gathered, which may be kept for the backward."""
    seconds: float = field(default=-1.0)
    """Where it is not given, that of the phases, through which all ranks keep step."""
    compute_s: float = field(default=-1.0)
    """Of the rank with the most to compute."""

    def __post_init__(self) -> None:
        if self.seconds < 0:
            object.__setattr__(self, "seconds", seconds(self.phases))
        if self.compute_s < 0:
            computed = sum(phase.times * phase.compute_s for phase in self.phases)
            object.__setattr__(self, "compute_s", computed)

    @property
    def exposed_s(self) -> float:
        """Transfers that nothing hides."""
        return self.seconds - self.compute_s

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(
            self.phases + other.phases,
            self.nic_bytes + other.nic_bytes,
            self.inside_bytes + other.inside_bytes,
            max(self.memory_bytes, other.memory_bytes),
            self.gathered_bytes + other.gathered_bytes,
            self.seconds + other.seconds,
            self.compute_s + other.compute_s,
        )
