"""Bytes over every link of a cluster, counted message by message.

Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter

from wf_backends.cluster import Topology
from wf_backends.planner.overlap_model import Transfer, transfer

LinkEnd = tuple[bool, str, int, int]
"""Whether it is a NIC, "out" or "in", whose, and of a direct link the far end's."""


def link_ends(at: Topology, source: int, target: int) -> tuple[LinkEnd, LinkEnd]:
    """What a message from rank `source` to rank `target` goes through."""
    if at.host(source) != at.host(target):
        return (True, "out", at.nic(source), -1), (True, "in", at.nic(target), -1)
    ends = (target, source) if at.direct_links else (-1, -1)
    return (False, "out", source, ends[0]), (False, "in", target, ends[1])


class Loads:
    """Bytes that cross every link, both ways; several phases may be added up."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.inside: Counter[tuple[str, int, int]] = Counter()
        self.nics: Counter[tuple[str, int]] = Counter()

    def add(self, source: int, target: int, num_bytes: int) -> None:
        """A message from rank `source` to rank `target`."""
        for is_nic, way, whose, far in link_ends(self.topology, source, target):
            if is_nic:
                self.nics[way, whose] += num_bytes
            else:
                self.inside[way, whose, far] += num_bytes

    def update(self, other: Loads) -> None:
        self.inside.update(other.inside)
        self.nics.update(other.nics)

    @property
    def nic_bytes(self) -> int:
        return max(self.nics.values(), default=0)

    @property
    def inside_bytes(self) -> int:
        return max(self.inside.values(), default=0)

    @property
    def transfer(self) -> Transfer:
        """Until the busiest link is done."""
        return transfer(self.topology, self.inside_bytes, self.nic_bytes)
