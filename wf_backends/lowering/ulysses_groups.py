"""Which ranks exchange heads for tokens, and which ranks form a route."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from wf_backends.schedule import Layout, join


@dataclass(frozen=True, slots=True)
class UlyssesGroups:
    """The ranks of a sequence in groups of `degree` members; a group is one rank of the route.

    Rank (block * degree + member) * stride + offset is that member of group block * stride +
    offset. With stride 1, members of a group are consecutive ranks, and neighbours on the route are
    `degree` ranks apart ("head-first" in LoongTrain, arXiv 2406.18485). With a stride of the number
    of groups, neighbours on the route are consecutive ranks ("context-first").
    """

    size: int
    degree: int = 1
    stride: int = 1

    @property
    def count(self) -> int:
        """The number of groups, which is the number of ranks of the route."""
        return self.size // self.degree

    def rank(self, group: int, member: int) -> int:
        """The rank of a member of a group."""
        block, offset = divmod(group, self.stride)
        return (block * self.degree + member) * self.stride + offset

    def find(self, rank: int) -> tuple[int, int]:
        """(group, member) of a rank."""
        quotient, offset = divmod(rank, self.stride)
        block, member = divmod(quotient, self.degree)
        return block * self.stride + offset, member

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group."""
        return tuple(self.rank(group, member) for member in range(self.degree))

    def route(self, member: int) -> tuple[int, ...]:
        """The ranks of one route: those that have this member index in their groups."""
        return tuple(self.rank(group, member) for group in range(self.count))

    def merge(self, layout: Layout) -> Layout:
        """[group] -> the shards of its members, joined."""
        return tuple(
            join(piece for rank in self.members(group) for piece in layout[rank])
            for group in range(self.count)
        )

    def groups_per_host(self, host_size: int) -> int:
        """The number of neighbouring groups whose equal members share a host of that size."""
        if host_size % (self.degree * self.stride) == 0:
            return host_size // self.degree
        return gcd(self.stride, host_size)

    def rank_distance(self, groups: int) -> int:
        """The distance in ranks of equal members of groups at a distance of `groups`.

        `groups` must be less than the stride or a multiple of it.
        """
        return groups if groups < self.stride else groups * self.degree
