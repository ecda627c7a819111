"""How long a pass takes if every rank and every link goes on as soon as it can.

Pure: standard library only. Ranks do not keep step: a rank waits for the messages that it sends
and receives, and for nothing else, so a link that is busy now may be idle later while others are.
What part of a message's time nothing hides, a rank spends as soon as it is posted.
What leaves for home shares a link evenly with what was posted before it and is not there yet. All
of it is sums and maxima, so that nothing gets slower where a link or a kernel gets faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from wf_backends.loads import LinkEnd, link_ends
from wf_backends.pools import Pools
from wf_backends.rankphases import Messages, RankPhase
from wf_backends.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Posted:
    """Messages of one moment: what each rank's go through, and when a link is through with them."""

    ends: list[set[LinkEnd]]
    served: dict[LinkEnd, tuple[float, float]]
    """(seconds if nothing joins them, seconds of all that had left for home by then)."""


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
        """A message sets off when both ends are ready; those of one moment share a link.

        Args:
            given: those that ranks wait for which receive any of them, and no others.
        """
        queues: defaultdict[LinkEnd, list[tuple[float, int]]] = defaultdict(list)
        users: list[set[LinkEnd]] = [set() for _ in sent]
        got = {peer for messages in given for peer, _ in messages}
        held = [0.0] * len(sent)
        for several, waits in ((sent, range(len(sent))), (given, got)):
            for rank, messages in enumerate(several):
                for peer, num_bytes in messages:
                    ready = max(self.now[rank], self.now[peer])
                    ends = self._link_ends(rank, peer)
                    for end in ends:
                        queues[end].append((ready, num_bytes))
                    for one in (rank, peer):
                        held[one] += self.topology.hold_s(num_bytes)
                        if one in waits:
                            users[one].update(ends)
        for end, queue in queues.items():
            self._serve(end, queue, leaving)
        self.now = list(map(add, self.now, held))
        return Posted(users, {end: (self._free[end], self._left[end]) for end in queues})

    def _landed(self, posted: Posted) -> list[float]:
        """When all messages of every rank, in and out, have landed; 0 for ranks that have none."""
        landed = {
            end: free + self._left[end] - left + self._link(end).latency_s
            for end, (free, left) in posted.served.items()
        }
        return [max((landed[end] for end in ends), default=0.0) for ends in posted.ends]

    def _serve(self, end: LinkEnd, queue: list[tuple[float, int]], leaving: bool) -> None:
        """Send a queue's messages, the first one that is ready first."""
        rate = self._link(end).bytes_per_s
        for ready, num_bytes in sorted(queue):
            took = num_bytes / rate
            self._free[end] = max(self._free[end], ready) + took
            self._left[end] += took * leaving

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
