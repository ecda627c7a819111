"""How long a pass takes if every rank and every link goes on as soon as it can.

Ranks do not keep step: a rank waits for the messages that it sends and receives, and for nothing
else. A message sets off when both its ranks have posted it. Messages that are posted together share
a link evenly, so that a short one lands before a long one; those posted next go after them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest
from math import inf

from wf_backends.cluster import Link, Topology
from wf_backends.cost.workload import Cost, Span
from wf_backends.lowering import UlyssesGroups

Messages = Sequence[tuple[int, int]]  # (peer, bytes)
LinkEnd = tuple[bool, str, int, int]
"""(is a NIC, "out" or "in", its NIC or rank, the far rank of a direct link or -1)."""
Queued = tuple[float, float, tuple[int, int]]
"""A message on one end of its link: when both its ranks are ready, how many seconds it takes alone,
and these ranks."""
Landed = dict[int, float]
"""By rank: when the last of its messages of one moment is there."""


@dataclass(frozen=True, slots=True)
class PhaseRound:
    """A round of a step: what is sent before and after its tiles (see lowering's `Round`)."""

    fetch: Messages = ()
    pass_on: Messages = ()
    seconds: float = 0.0
    """Of its tiles."""
    pass_back: Messages = ()
    home: Messages = ()


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What one rank does in a phase: the hop goes on meanwhile, the rounds follow each other."""

    label: str
    hop: Messages = ()
    rounds: tuple[PhaseRound, ...] = ()


class Simulator:
    """The clocks of all ranks and links, and the bytes that the links carry.

    Args:
        groups: the ranks of the cluster that are one rank of the route, with other heads.
    """

    def __init__(self, topology: Topology, groups: UlyssesGroups) -> None:
        self.topology, self.groups = topology, groups
        self.now = [0.0] * groups.count
        self.computed = [0.0] * groups.count
        self.done = self.transfer_s = 0.0
        self._bytes: Counter[LinkEnd] = Counter()
        self._free: dict[LinkEnd, float] = {}
        self._ends: dict[tuple[int, int], list[LinkEnd]] = {}
        self._spans: list[list[Span]] = [[] for _ in self.now]

    def cost(self, memory_bytes: float, gathered_bytes: float) -> Cost:
        """What all phases that were run have cost, with these buffers."""
        ends_last = max(self._spans, key=lambda own: max((s.stop for s in own), default=0.0))
        return Cost(
            max(self.done, *self.now),
            max(self.computed),
            self.transfer_s,
            nic_bytes=max((sent for end, sent in self._bytes.items() if end[0]), default=0),
            inside_bytes=max((sent for end, sent in self._bytes.items() if not end[0]), default=0),
            memory_bytes=memory_bytes,
            gathered_bytes=gathered_bytes,
            spans=tuple(ends_last),
        )

    def run(self, ranks: Sequence[RankPhase]) -> None:
        """One phase of all ranks, posted in the executor's order; some may have fewer rounds."""
        label = ranks[0].label
        rounds = [*zip_longest(*(one.rounds for one in ranks), fillvalue=PhaseRound())]
        fetched = [self._post(label, [one.fetch for one in each]) for each in rounds]
        hopped = self._post(label, [one.hop for one in ranks])
        passed_on, passed_back = Landed(), Landed()
        for fetch, each in zip(fetched, rounds, strict=True):
            self._wait(fetch)
            self._wait(passed_on)
            passed_on = self._post(label, [one.pass_on for one in each])
            self._compute(label, [one.seconds for one in each])
            self._wait(passed_back)
            passed_back = self._post(label, [one.pass_back for one in each])
            home = self._post(label, [one.home for one in each])
            self.done = max([self.done, *home.values()])
        self._wait(hopped)

    def _wait(self, landed: Landed) -> None:
        for rank, there in landed.items():
            self.now[rank] = max(self.now[rank], there)

    def _compute(self, label: str, tiles_s: Sequence[float]) -> None:
        for rank, own_s in enumerate(tiles_s):
            start = self.now[rank]
            self.now[rank] = start + own_s
            self.computed[rank] += own_s
            self._note(rank, label, "compute", start, start + own_s)

    def _post(self, label: str, sent: Sequence[Messages]) -> Landed:
        """Send all messages of one moment."""
        if not any(sent):
            return {}
        queues = defaultdict[LinkEnd, list[Queued]](list)
        set_off, held_s = dict[int, float](), [0.0] * len(sent)
        for rank, messages in enumerate(sent):
            for peer, num_bytes in messages:
                ready = max(self.now[rank], self.now[peer])
                for end in self._link_ends(rank, peer):
                    took = num_bytes / self._link(end).bytes_per_s
                    queues[end].append((ready, took, (rank, peer)))
                    self._bytes[end] += num_bytes
                for one in (rank, peer):
                    set_off[one] = min(set_off.get(one, ready), ready)
                    held_s[one] += self.topology.hold_s(num_bytes)
        landed = Landed()
        self.transfer_s += max(self._send(end, queue, landed) for end, queue in queues.items())
        for rank, there in landed.items():
            self._note(rank, label, "transfer", set_off[rank], there)
        self.now = [now + held for now, held in zip(self.now, held_s, strict=True)]
        return landed

    def _send(self, end: LinkEnd, queue: list[Queued], landed: Landed) -> float:
        """Note when these messages are through one end; seconds that they take by themselves."""
        free, link = self._free.get(end, 0.0), self._link(end)
        through = shared([(ready, took) for ready, took, _ in queue], free)
        self._free[end] = max(through)
        for (_, _, ranks), upto in zip(queue, through, strict=True):
            for rank in ranks:
                landed[rank] = max(landed.get(rank, 0.0), upto + link.latency_s)
        return sum(took for _, took, _ in queue) + link.latency_s

    def _note(self, rank: int, label: str, kind: str, start: float, stop: float) -> None:
        if stop > start:
            self._spans[rank].append(Span(label, kind, start, stop))

    def _link(self, end: LinkEnd) -> Link:
        return self.topology.between if end[0] else self.topology.inside

    def _link_ends(self, rank: int, peer: int) -> list[LinkEnd]:
        """What a message of every member of a rank to its like goes through."""
        if (rank, peer) not in self._ends:
            pairs = zip(*(self.groups.members(one) for one in (rank, peer)), strict=True)
            found = (link_ends(self.topology, *pair) for pair in pairs)
            self._ends[rank, peer] = [end for ends in found for end in ends]
        return self._ends[rank, peer]


def shared(queue: Sequence[tuple[float, float]], free: float) -> list[float]:
    """When each message has been sent, of several that share a link evenly.

    Args:
        queue: for each when it is ready, and how long it takes alone.
        free: from when on there is anything to share.
    """
    waiting = sorted(range(len(queue)), key=lambda at: queue[at][0], reverse=True)
    through, active = [0.0] * len(queue), list[tuple[float, int]]()
    now, done = free, 0.0  # how much of a message that was there all the time is done
    while waiting or active:
        starts = max(now, queue[waiting[-1]][0]) if waiting else inf
        ends = now + (active[0][0] - done) * len(active) if active else inf
        if ends <= starts:
            done, at = heappop(active)
            now = through[at] = ends
        else:
            done += (starts - now) / max(1, len(active))
            now, at = starts, waiting.pop()
            heappush(active, (done + queue[at][1], at))
    return through


def link_ends(at: Topology, source: int, target: int) -> tuple[LinkEnd, LinkEnd]:
    """What a message from rank `source` to rank `target` goes through."""
    if at.host(source) != at.host(target):
        return (True, "out", at.nic(source), -1), (True, "in", at.nic(target), -1)
    ends = (target, source) if at.direct_links else (-1, -1)
    return (False, "out", source, ends[0]), (False, "in", target, ends[1])
