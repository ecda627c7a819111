"""Bytes over every link of a cluster, counted message by message.

Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter

from wf_backends.timeline import Transfer, transfer
from wf_backends.topology import Topology


class Loads:
    """Bytes that cross every link, both ways; several phases may be added up."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.inside: Counter[tuple[str, int, int]] = Counter()
        self.nics: Counter[tuple[str, int]] = Counter()

    def add(self, source: int, target: int, num_bytes: int) -> None:
        """A message from rank `source` to rank `target`."""
        at = self.topology
        if at.host(source) == at.host(target):
            one_link = at.direct_links
            self.inside["out", source, target if one_link else -1] += num_bytes
            self.inside["in", target, source if one_link else -1] += num_bytes
        else:
            self.nics["out", at.nic(source)] += num_bytes
            self.nics["in", at.nic(target)] += num_bytes

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
