"""How long a pass takes if every rank and every link goes on as soon as it can.

Pure: standard library only. Ranks do not keep step: a rank waits for the messages that it sends
and receives, and for nothing else, so a link that is busy now may be idle later while others are.
What part of a message's time nothing hides, a rank spends as soon as it is posted.
Messages of one moment share a link evenly, so that a short one is there before a long one; those of
the next moment go after them. What leaves for home shares a link evenly with what was posted before
it and is not there yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import add

from wf_backends.cluster import Link, Topology
from wf_backends.lowering import Pools
from wf_backends.planner.link_loads import LinkEnd, link_ends
from wf_backends.planner.rank_phases import Messages, RankPhase


@dataclass(frozen=True, slots=True)
class Posted:
    """Messages of one moment."""

    served: list[dict[LinkEnd, float]]
    """By rank and link: when the last one that the rank waits for is through, if none joins it."""
    left: dict[LinkEnd, float]
    """Seconds of all that had left for home by then."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A message on one end of its link: it sets off when both its ranks are ready."""

    ready: float
    took: float
    """Seconds, with the link to itself."""
    awaited_by: list[int]


class Pace:
    """The clocks of all ranks and links.

    Args:
        pools: the ranks of the cluster that are one rank of the route, with other heads.
    """

    def __init__(self, topology: Topology, pools: Pools) -> None:
        self.topology, self.pools = topology, pools
        size = pools.count
        self.now = [0.0] * size
        self.computed = [0.0] * size
        self.done = 0.0
        self._free: defaultdict[LinkEnd, float] = defaultdict(float)
        self._left: defaultdict[LinkEnd, float] = defaultdict(float)
        self._ends: dict[tuple[int, int], list[LinkEnd]] = {}

    @property
    def seconds(self) -> float:
        """Until the last rank is done and the last result is home."""
        return max(self.done, *self.now)

    @property
    def busiest_s(self) -> float:
        """What the rank with the most to compute has computed."""
        return max(self.computed)

    def run(self, ranks: Sequence[RankPhase], took: Sequence[Sequence[float]]) -> None:
        """One phase of all ranks, posted in the executor's order.

        Args:
            took: seconds of every rank's tiles, round by round.
        """
        rounds = range(len(took[0]))
        fetches = [self._post([rank.fetches[at] for rank in ranks]) for at in rounds]
        hops = self._post([rank.hop for rank in ranks], [rank.gives for rank in ranks])
        for at in rounds:
            fetched = self._landed(fetches[at])
            for rank, own in enumerate(took):
                self.now[rank] = max(self.now[rank], fetched[rank]) + own[at]
                self.computed[rank] += own[at]
            gone = self._post([rank.leaves[at] for rank in ranks], leaving=True)
            self.done = max(self.done, *self._landed(gone))
        self.now = list(map(max, self.now, self._landed(hops)))

    def _post(
        self, sent: Sequence[Messages], given: Sequence[Messages] = (), leaving: bool = False
    ) -> Posted:
        """Send all messages of one moment.

        Args:
            given: those that ranks wait for which receive any of them, and no others.
        """
        served: list[dict[LinkEnd, float]] = [{} for _ in sent]
        queues, held = self._queues(sent, given)
        for end, queue in queues.items():
            through = self._serve(end, queue, leaving)
            for one, upto in zip(queue, through, strict=True):
                for rank in one.awaited_by:
                    served[rank][end] = max(served[rank].get(end, 0.0), upto)
        self.now = list(map(add, self.now, held))
        return Posted(served, {end: self._left[end] for end in queues})

    def _queues(
        self, sent: Sequence[Messages], given: Sequence[Messages]
    ) -> tuple[dict[LinkEnd, list[Queued]], list[float]]:
        """The messages of every link, and for how long each rank is held by its own."""
        queues: defaultdict[LinkEnd, list[Queued]] = defaultdict(list)
        got = {peer for messages in given for peer, _ in messages}
        held = [0.0] * len(sent)
        for several, who_waits in ((sent, range(len(sent))), (given, got)):
            for rank, messages in enumerate(several):
                for peer, num_bytes in messages:
                    ready = max(self.now[rank], self.now[peer])
                    awaited_by = [one for one in (rank, peer) if one in who_waits]
                    for end in self._link_ends(rank, peer):
                        took = num_bytes / self._link(end).bytes_per_s
                        queues[end].append(Queued(ready, took, awaited_by))
                    for one in (rank, peer):
                        held[one] += self.topology.hold_s(num_bytes)
        return queues, held

    def _landed(self, posted: Posted) -> list[float]:
        """When all messages of every rank, in and out, have landed; 0 for ranks that have none."""
        later = {
            end: self._left[end] - left + self._link(end).latency_s
            for end, left in posted.left.items()
        }
        return [
            max((through + later[end] for end, through in ends.items()), default=0.0)
            for ends in posted.served
        ]

    def _serve(self, end: LinkEnd, queue: Sequence[Queued], leaving: bool) -> list[float]:
        """When the link is through with each of these messages."""
        through = shared([(one.ready, one.took) for one in queue], self._free[end])
        self._free[end] = max(through)
        self._left[end] += leaving * sum(one.took for one in queue)
        return through

    def _link(self, end: LinkEnd) -> Link:
        return self.topology.between if end[0] else self.topology.inside

    def _link_ends(self, rank: int, peer: int) -> list[LinkEnd]:
        """What a message of every member of a rank to its like goes through."""
        found = self._ends.get((rank, peer))
        if found is None:
            found = list[LinkEnd]()
            for member in range(self.pools.degree):
                ends = (self.pools.rank(one, member) for one in (rank, peer))
                found += link_ends(self.topology, *ends)
            self._ends[rank, peer] = found
        return found


def shared(queue: Sequence[tuple[float, float]], free: float) -> list[float]:
    """When each is through of those that share something evenly.

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
