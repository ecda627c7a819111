"""Which links a message goes through, and how long bytes take on the busiest one."""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends.cluster import Topology

LinkEnd = tuple[bool, str, int, int]
"""(is a NIC, "out" or "in", its NIC or rank, the far rank of a direct link or -1)."""


def link_ends(at: Topology, source: int, target: int) -> tuple[LinkEnd, LinkEnd]:
    """What a message from rank `source` to rank `target` goes through."""
    if at.host(source) != at.host(target):
        return (True, "out", at.nic(source), -1), (True, "in", at.nic(target), -1)
    ends = (target, source) if at.direct_links else (-1, -1)
    return (False, "out", source, ends[0]), (False, "in", target, ends[1])


@dataclass(slots=True)
class Load:
    """Bytes one way through the busiest NIC, and through the busiest rank's link in its host."""

    nic: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.nic + other.nic, self.inside + other.inside)

    def seconds(self, topology: Topology) -> float:
        """max(latency + bytes / rate) over both kinds of links; 0 where nothing is sent."""
        return max(topology.inside.seconds(self.inside), topology.between.seconds(self.nic))

    def hold_s(self, topology: Topology, messages: int = 1) -> float:
        """How long as many messages out, and as many in, keep a rank from computing."""
        if not topology.occupied:
            return 0.0
        own = self.inside + self.nic / topology.ranks_per_nic
        return topology.hold_s(2 * own, 2 * messages) if own else 0.0


NOTHING = Load()
