"""Which ranks trade heads for tokens, and which go around a route together.

Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from wf_backends.schedule import Layout, join


@dataclass(frozen=True, slots=True)
class UlyssesGroups:
    """All ranks as groups of `degree` members; a group is one rank of the route.

    Rank (block * degree + member) * stride + place is a member of group block * stride + place.
    With stride 1 a group is consecutive ranks, and ranks of the route are far apart ("head-first"
    in LoongTrain, arXiv 2406.18485). With as much as there are groups it is the other way round
    ("context-first"): ranks of the route are consecutive.
    """

    size: int
    degree: int = 1
    stride: int = 1

    @property
    def count(self) -> int:
        """How many groups there are: ranks of the route."""
        return self.size // self.degree

    def rank(self, group: int, member: int) -> int:
        """The rank that is this member of the group."""
        block, place = divmod(group, self.stride)
        return (block * self.degree + member) * self.stride + place

    def find(self, rank: int) -> tuple[int, int]:
        """(group, member) of a rank."""
        above, place = divmod(rank, self.stride)
        block, member = divmod(above, self.degree)
        return block * self.stride + place, member

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group."""
        return tuple(self.rank(group, member) for member in range(self.degree))

    def route(self, member: int) -> tuple[int, ...]:
        """The ranks that are this member of their groups: those of one route."""
        return tuple(self.rank(group, member) for group in range(self.count))

    def merge(self, layout: Layout) -> Layout:
        """The shards of the groups, by group."""
        return tuple(
            join(piece for rank in self.members(group) for piece in layout[rank])
            for group in range(self.count)
        )

    def groups_per_host(self, host_size: int) -> int:
        """How many neighbouring groups have their like members on one host of so many ranks."""
        if host_size % (self.degree * self.stride) == 0:
            return host_size // self.degree
        return gcd(self.stride, host_size)

    def rank_distance(self, groups: int) -> int:
        """How far apart in rank numbers the same members are of groups that are `groups` apart.

        Of groups further apart than the stride, if they are a multiple of it.
        """
        return groups if groups < self.stride else groups * self.degree
