"""How long a pass takes if every rank and every link goes on as soon as it can.

Pure: standard library only. Ranks do not keep step. A rank waits for the messages that it sends and
receives, and for nothing else. A message sets off when both its ranks have posted it. Messages that
are posted together share a link evenly, so that a short one lands before a long one; those posted
next go after them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest
from operator import add

from wf_backends.cluster import Link, Topology
from wf_backends.lowering import UlyssesGroups
from wf_backends.planner.link_loads import LinkEnd, link_ends
from wf_backends.planner.rank_phases import Messages, RankPhase
from wf_backends.planner.workload import Cost, Span


@dataclass(frozen=True, slots=True)
class Posted:
    """Messages of one moment."""

    label: str
    set_off: dict[int, float]
    """By rank: when the first message that it waits for begins."""
    landed: dict[int, float]
    """By rank: when the last message that it waits for is there."""


NOTHING_POSTED = Posted("", {}, {})
Queued = tuple[float, float, list[int]]
"""A message on one end of its link: when both its ranks are ready, how many seconds it takes alone,
and the ranks that wait for it."""


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

    def run(self, ranks: Sequence[RankPhase], took: Sequence[Sequence[float]]) -> None:
        """One phase of all ranks, posted in the executor's order.

        Args:
            took: seconds of every rank's tiles, round by round. Some ranks may have fewer rounds.
        """
        label = ranks[0].label

        def by_round(sent: Iterable[Sequence[Messages]]) -> Iterator[tuple[Messages, ...]]:
            return zip_longest(*sent, fillvalue=Messages())

        fetches = [self._post(label, sent) for sent in by_round(one.fetches for one in ranks)]
        hops = self._post(label, [rank.hop for rank in ranks], [rank.gives for rank in ranks])
        computed = zip_longest(*took, fillvalue=0.0)
        on, back = by_round(one.pass_on for one in ranks), by_round(one.pass_back for one in ranks)
        leaves = by_round(one.leaves for one in ranks)
        passed_on = passed_back = NOTHING_POSTED
        rounds = enumerate(zip_longest(on, computed, back, leaves, fillvalue=()))
        for at, (onward, tiles_s, backward, leaving) in rounds:
            self._wait(fetches[at], passed_on)
            passed_on = self._post(label, onward)
            self._compute(label, tiles_s)
            self._wait(passed_back)
            passed_back = self._post(label, backward)
            gone = self._post(label, leaving)
            self._note_transfers(gone)
            self.done = max([self.done, *gone.landed.values()])
        self._wait(hops)

    def _wait(self, *several: Posted) -> None:
        """Every rank waits for its messages of these moments."""
        for posted in several:
            self._note_transfers(posted)
            for rank, there in posted.landed.items():
                self.now[rank] = max(self.now[rank], there)

    def _compute(self, label: str, tiles_s: Sequence[float]) -> None:
        for rank, own_s in enumerate(tiles_s):
            start = self.now[rank]
            self.now[rank] = start + own_s
            self.computed[rank] += own_s
            self._note(rank, label, "compute", start, start + own_s)

    def _post(self, label: str, sent: Sequence[Messages], given: Sequence[Messages] = ()) -> Posted:
        """Send all messages of one moment.

        Args:
            given: those that ranks wait for which receive any of them, and no others.
        """
        if not (any(sent) or any(given)):
            return NOTHING_POSTED
        posted, held_s = Posted(label, {}, {}), [0.0] * len(sent)
        queues = defaultdict[LinkEnd, list[Queued]](list)
        readers = {peer for messages in given for peer, _ in messages}
        for by_rank, who_waits in ((sent, range(len(sent))), (given, readers)):
            for rank, messages in enumerate(by_rank):
                for peer, num_bytes in messages:
                    ready = max(self.now[rank], self.now[peer])
                    waiting = [one for one in (rank, peer) if one in who_waits]
                    for one in waiting:
                        posted.set_off[one] = min(posted.set_off.get(one, ready), ready)
                    for end in self._link_ends(rank, peer):
                        took = num_bytes / self._link(end).bytes_per_s
                        queues[end].append((ready, took, waiting))
                        self._bytes[end] += num_bytes
                    for one in (rank, peer):
                        held_s[one] += self.topology.hold_s(num_bytes)
        self.transfer_s += max(self._send(end, queue, posted) for end, queue in queues.items())
        self.now = list(map(add, self.now, held_s))
        return posted

    def _send(self, end: LinkEnd, queue: list[Queued], posted: Posted) -> float:
        """Note when these messages are through one end; seconds that they take by themselves."""
        free, link = self._free.get(end, 0.0), self._link(end)
        through = shared([(ready, took) for ready, took, _ in queue], free)
        self._free[end] = max(through)
        for (_, _, waiting), upto in zip(queue, through, strict=True):
            for rank in waiting:
                posted.landed[rank] = max(posted.landed.get(rank, 0.0), upto + link.latency_s)
        return sum(took for _, took, _ in queue) + link.latency_s

    def _note_transfers(self, posted: Posted) -> None:
        for rank, there in posted.landed.items():
            self._note(rank, posted.label, "transfer", posted.set_off[rank], there)

    def _note(self, rank: int, label: str, kind: str, start: float, stop: float) -> None:
        if stop > start:
            self._spans[rank].append(Span(label, kind, start, stop))

    def _link(self, end: LinkEnd) -> Link:
        return self.topology.between if end[0] else self.topology.inside

    def _link_ends(self, rank: int, peer: int) -> list[LinkEnd]:
        """What a message of every member of a rank to its like goes through."""
        found = self._ends.get((rank, peer))
        if found is None:
            found = list[LinkEnd]()
            for member in range(self.groups.degree):
                ends = (self.groups.rank(one, member) for one in (rank, peer))
                found += link_ends(self.topology, *ends)
            self._ends[rank, peer] = found
        return found


def shared(queue: Sequence[tuple[float, float]], free: float) -> list[float]:
    """When each message has been sent, of several that share a link evenly.

    Args:
        queue: for each when it is ready, and how long it takes alone.
        free: from when on there is anything to share.
    """
    through, active = [0.0] * len(queue), list[tuple[float, int]]()
    now, done = free, 0.0  # how much of a message that was there all the time is done

    def finish() -> None:
        nonlocal now, done
        upto, first = heappop(active)
        now, done = now + (upto - done) * (len(active) + 1), upto
        through[first] = now

    for at in sorted(range(len(queue)), key=lambda at: queue[at][0]):
        ready, took = queue[at]
        while active and now + (active[0][0] - done) * len(active) <= ready:
            finish()
        if ready > now:
            done += (ready - now) / max(1, len(active))
            now = ready
        heappush(active, (done + took, at))
    while active:
        finish()
    return through
