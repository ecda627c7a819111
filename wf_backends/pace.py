"""How long a pass takes if every rank and every link goes on as soon as it can.

Pure: standard library only. Ranks do not keep step: a rank waits for the messages that it sends
and receives, and for nothing else, so a link that is busy now may be idle later while others are.
All of it is sums and maxima, so that nothing gets slower where a link or a kernel gets faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from wf_backends.rankphases import Messages, RankPhase
from wf_backends.topology import Topology

LinkEnd = tuple[bool, str, int, int]
"""Whether it is a NIC, "out" or "in", whose, and of a direct link the far end's."""


class Pace:
    """The clocks of all ranks and links.

    Args:
        degree: consecutive ranks of the cluster that are one rank of the route, with other heads.
    """

    def __init__(self, topology: Topology, degree: int) -> None:
        self.topology, self.degree = topology, degree
        size = topology.size // degree
        self.now = [0.0] * size
        self.computed = [0.0] * size
        self.done = 0.0
        self._free: defaultdict[LinkEnd, float] = defaultdict(float)
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
        fetched = [self._post([rank.fetches[at] for rank in ranks]) for at in rounds]
        landed = self._post([rank.hop for rank in ranks])
        for at in rounds:
            for rank, own in enumerate(took):
                self.now[rank] = max(self.now[rank], fetched[at][rank]) + own[at]
                self.computed[rank] += own[at]
            gone = self._post([rank.leaves[at] for rank in ranks])
            self.done = max(self.done, *gone)
        self.now = list(map(max, self.now, landed))

    def _post(self, sent: Sequence[Messages]) -> list[float]:
        """When all messages of every rank, in and out, have landed.

        A message sets off when both ends are ready. Those of one moment share a link: each lands
        when the link is through with all of them.
        """
        queues: defaultdict[LinkEnd, list[tuple[float, int]]] = defaultdict(list)
        users: list[set[LinkEnd]] = [set() for _ in sent]
        for rank, messages in enumerate(sent):
            for peer, num_bytes in messages:
                ready = max(self.now[rank], self.now[peer])
                for end in self._link_ends(rank, peer):
                    queues[end].append((ready, num_bytes))
                    users[rank].add(end)
                    users[peer].add(end)
        landed = {end: self._serve(end, queue) for end, queue in queues.items()}
        return [max((landed[end] for end in ends), default=0.0) for ends in users]

    def _serve(self, end: LinkEnd, queue: list[tuple[float, int]]) -> float:
        """Send a queue's messages, the first one that is ready first; when they have landed."""
        link = self.topology.between if end[0] else self.topology.inside
        free = self._free[end]
        for ready, num_bytes in sorted(queue):
            free = max(free, ready) + num_bytes / link.bytes_per_s
        self._free[end] = free
        return free + link.latency_s

    def _link_ends(self, rank: int, peer: int) -> list[LinkEnd]:
        """What a message of every member of a rank to its like goes through."""
        found = self._ends.get((rank, peer))
        if found is None:
            found = []
            for member in range(self.degree):
                found += self._ends_of(rank * self.degree + member, peer * self.degree + member)
            self._ends[rank, peer] = found
        return found

    def _ends_of(self, source: int, target: int) -> list[LinkEnd]:
        at = self.topology
        if at.host(source) != at.host(target):
            return [(True, "out", at.nic(source), -1), (True, "in", at.nic(target), -1)]
        apart = at.direct_links
        return [
            (False, "out", source, target if apart else -1),
            (False, "in", target, source if apart else -1),
        ]
