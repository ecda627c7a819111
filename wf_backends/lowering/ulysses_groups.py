"""Which ranks trade heads for tokens, and which go around a route together.

Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends.schedule import Layout, join


@dataclass(frozen=True, slots=True)
class Pools:
    """All ranks as pools of `degree` members; a pool is one rank of the route.

    Rank (block * degree + member) * stride + place is a member of pool block * stride + place. With
    stride 1 a pool is consecutive ranks, and ranks of the route are far apart ("head-first" in
    LoongTrain, arXiv 2406.18485). With as much as there are pools it is the other way round
    ("context-first"): ranks of the route are consecutive.
    """

    size: int
    degree: int = 1
    stride: int = 1

    @property
    def count(self) -> int:
        """Pools: ranks of the route."""
        return self.size // self.degree

    def rank(self, pool: int, member: int) -> int:
        """The rank that is this member of the pool."""
        block, place = divmod(pool, self.stride)
        return (block * self.degree + member) * self.stride + place

    def find(self, rank: int) -> tuple[int, int]:
        """(pool, member) of a rank."""
        above, place = divmod(rank, self.stride)
        block, member = divmod(above, self.degree)
        return block * self.stride + place, member

    def members(self, pool: int) -> tuple[int, ...]:
        """The ranks of a pool."""
        return tuple(self.rank(pool, member) for member in range(self.degree))

    def route(self, member: int) -> tuple[int, ...]:
        """The ranks that are this member of their pools: those of one route."""
        return tuple(self.rank(pool, member) for pool in range(self.count))

    def merge(self, layout: Layout) -> Layout:
        """The shards of the pools, by pool."""
        return tuple(
            join(piece for rank in self.members(pool) for piece in layout[rank])
            for pool in range(self.count)
        )

    def apart(self, pools: int) -> int:
        """How far apart in rank numbers the same members are of pools that are `pools` apart.

        Of pools further apart than the stride, if they are a multiple of it.
        """
        return pools if pools < self.stride else pools * self.degree
