"""How long a pass takes if every rank and every link goes on as soon as it can.

Ranks do not keep step: a rank waits only for the messages that it sends and receives. A message
sets off when both its ranks have posted it. Messages that are posted together share a link evenly,
so that a short one arrives before a long one; messages posted later follow them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import zip_longest
from math import inf

from wf_backends.cluster import Link, Topology
from wf_backends.cost.workload import Cost, Span
from wf_backends.lowering import UlyssesGroups

MessageSizes = Sequence[tuple[int, int]]  # (peer, bytes)
LinkEnd = tuple[bool, str, int, int]
"""(whether it is a NIC, "out" or "in", the NIC or rank, the other rank of a direct link or -1)."""
QueuedMessage = tuple[float, float, tuple[int, int]]
"""A message at a link's end: (when both its ranks are ready, seconds alone, these ranks)."""
Arrivals = dict[int, float]
"""By rank: when the last of its messages that were posted together has arrived."""


@dataclass(frozen=True, slots=True)
class PhaseRound:
    """A round of a step: what is sent before and after its tiles (see `lowering.Round`)."""

    fetch: MessageSizes = ()
    pass_on: MessageSizes = ()
    seconds: float = 0.0
    """Of its tiles."""
    pass_back: MessageSizes = ()
    reduce: MessageSizes = ()


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What one rank does in a phase: its rounds one after another, and its hop meanwhile."""

    label: str
    hop: MessageSizes = ()
    rounds: tuple[PhaseRound, ...] = ()


class Simulator:
    """The clocks of all ranks and links, and the bytes that the links carry.

    Args:
        groups: which ranks of the cluster make up each rank of the route.
    """

    def __init__(self, topology: Topology, groups: UlyssesGroups) -> None:
        self.topology, self.groups = topology, groups
        self.now = [0.0] * groups.count  # seconds since the start, by rank of the route
        self.computed_s = [0.0] * groups.count
        self.last_result_at = 0.0  # when the last result has arrived at its owner
        self.transfer_s = 0.0
        self._bytes: Counter[LinkEnd] = Counter()
        self._free_at: dict[LinkEnd, float] = {}
        self._link_ends = cache(self._find_link_ends)
        self._spans: list[list[Span]] = [[] for _ in self.now]

    def cost(self) -> Cost:
        """What all phases that were run have cost, without memory."""
        ends_last = max(self._spans, key=lambda spans: max((s.stop for s in spans), default=0.0))
        return Cost(
            max(self.last_result_at, *self.now),
            max(self.computed_s),
            self.transfer_s,
            nic_bytes=max((sent for end, sent in self._bytes.items() if end[0]), default=0),
            inside_bytes=max((sent for end, sent in self._bytes.items() if not end[0]), default=0),
            spans=tuple(ends_last),
        )

    def run(self, ranks: Sequence[RankPhase]) -> None:
        """Run a phase of all ranks, posted in the runtime's order; some may have fewer rounds."""
        label = ranks[0].label
        rounds = [*zip_longest(*(phase.rounds for phase in ranks), fillvalue=PhaseRound())]
        fetches = [self._post(label, [r.fetch for r in of_ranks]) for of_ranks in rounds]
        hop = self._post(label, [phase.hop for phase in ranks])
        passed_on, passed_back = Arrivals(), Arrivals()
        for fetch, of_ranks in zip(fetches, rounds, strict=True):
            self._wait(fetch)
            self._wait(passed_on)
            passed_on = self._post(label, [r.pass_on for r in of_ranks])
            self._compute(label, [r.seconds for r in of_ranks])
            self._wait(passed_back)
            passed_back = self._post(label, [r.pass_back for r in of_ranks])
            results = self._post(label, [r.reduce for r in of_ranks])
            self.last_result_at = max([self.last_result_at, *results.values()])
        self._wait(hop)

    def _wait(self, arrivals: Arrivals) -> None:
        for rank, arrived_at in arrivals.items():
            self.now[rank] = max(self.now[rank], arrived_at)

    def _compute(self, label: str, tiles_s: Sequence[float]) -> None:
        for rank, seconds in enumerate(tiles_s):
            start = self.now[rank]
            self.now[rank] = start + seconds
            self.computed_s[rank] += seconds
            self._note(rank, label, "compute", start, start + seconds)

    def _post(self, label: str, messages_by_rank: Sequence[MessageSizes]) -> Arrivals:
        """Send messages that all ranks post at the same point of their programs."""
        if not any(messages_by_rank):
            return {}
        queues = defaultdict[LinkEnd, list[QueuedMessage]](list)
        sets_off, hold_s = dict[int, float](), [0.0] * len(messages_by_rank)
        for rank, messages in enumerate(messages_by_rank):
            for peer, num_bytes in messages:
                ready = max(self.now[rank], self.now[peer])
                for end in self._link_ends(rank, peer):
                    alone_s = num_bytes / self._link(end).bytes_per_s
                    queues[end].append((ready, alone_s, (rank, peer)))
                    self._bytes[end] += num_bytes
                for endpoint in (rank, peer):
                    sets_off[endpoint] = min(sets_off.get(endpoint, ready), ready)
                    hold_s[endpoint] += self.topology.hold_s(num_bytes)
        arrivals = Arrivals()
        self.transfer_s += max(self._send(end, queue, arrivals) for end, queue in queues.items())
        for rank, arrived_at in arrivals.items():
            self._note(rank, label, "transfer", sets_off[rank], arrived_at)
        self.now = [now + held for now, held in zip(self.now, hold_s, strict=True)]
        return arrivals

    def _send(self, end: LinkEnd, queue: list[QueuedMessage], arrivals: Arrivals) -> float:
        """Send a queue through one link end, noting arrivals. Returns the seconds that it takes."""
        free_at, link = self._free_at.get(end, 0.0), self._link(end)
        finished = finish_times([(ready, alone_s) for ready, alone_s, _ in queue], free_at)
        self._free_at[end] = max(finished)
        for (_, _, ranks), finish in zip(queue, finished, strict=True):
            for rank in ranks:
                arrivals[rank] = max(arrivals.get(rank, 0.0), finish + link.latency_s)
        return sum(alone_s for _, alone_s, _ in queue) + link.latency_s

    def _note(self, rank: int, label: str, kind: str, start: float, stop: float) -> None:
        if stop > start:
            self._spans[rank].append(Span(label, kind, start, stop))

    def _link(self, end: LinkEnd) -> Link:
        return self.topology.between if end[0] else self.topology.inside

    def _find_link_ends(self, rank: int, peer: int) -> list[LinkEnd]:
        """The link ends of a message between ranks of the route: each member sends to its peer."""
        pairs = zip(self.groups.members(rank), self.groups.members(peer), strict=True)
        return [end for pair in pairs for end in link_ends(self.topology, *pair)]


def finish_times(queue: Sequence[tuple[float, float]], free_at: float) -> list[float]:
    """When each of several messages that share a link evenly has been sent.

    Args:
        queue: (when it is ready, seconds that it takes alone) of each message.
        free_at: when the link has sent all earlier messages.
    """
    waiting = sorted(range(len(queue)), key=lambda i: queue[i][0], reverse=True)
    finished, active = [0.0] * len(queue), list[tuple[float, int]]()  # (sent_s at its end, index)
    now, sent_s = free_at, 0.0  # sent_s: of a message that has been active from the start
    while waiting or active:
        next_start = max(now, queue[waiting[-1]][0]) if waiting else inf
        next_finish = now + (active[0][0] - sent_s) * len(active) if active else inf
        if next_finish <= next_start:
            sent_s, index = heappop(active)
            now = finished[index] = next_finish
        else:
            sent_s += (next_start - now) / max(1, len(active))
            now, index = next_start, waiting.pop()
            heappush(active, (sent_s + queue[index][1], index))
    return finished


def link_ends(topology: Topology, source: int, target: int) -> tuple[LinkEnd, LinkEnd]:
    """What a message from rank `source` to rank `target` goes through."""
    if topology.host(source) != topology.host(target):
        return (True, "out", topology.nic(source), -1), (True, "in", topology.nic(target), -1)
    far_of_source, far_of_target = (target, source) if topology.direct_links else (-1, -1)
    return (False, "out", source, far_of_source), (False, "in", target, far_of_target)
