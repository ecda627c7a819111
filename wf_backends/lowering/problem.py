"""A schedule laid over a sequence, and which rows its ranks read in every step.

Pure: standard library only. One side stays (its rows are gathered once and computed on until the
end), the other walks. In the forward, queries stay and keys walk; in the backward either may walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from wf_backends.lowering.tiles import Parts, by_part, seen
from wf_backends.schedule import Layout, Mask, Ranges, Schedule, Shards, join

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """All that the programs of all ranks follow from."""

    schedule: Schedule
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    queries_walk: bool = False
    kept: bool = False
    """Whether walkers gather at first all rows that any step reads, as the other pass does, whose
    gathered rows are kept and used again."""
    host_size: int = 1
    """Neighbouring ranks of one host: of the side that stays, a row that several of them read
    crosses to them once."""


class Reads:
    """Rows (positions) that tiles use, found when they are asked for: one rank of thousands looks
    at its own part.

    Attributes:
        roles: the schedule; its field `q` names shards that stay, `kv` those that walk.
        stay_shards, walk_shards: those that each rank brings together, and first holds.
        stay_home, walk_home: the rows of either side that each rank owns.
    """

    def __init__(self, problem: Problem) -> None:
        self.mask, self.queries_walk = problem.mask, problem.queries_walk
        self.homes = {"q": problem.q_layout, "k": problem.kv_layout}
        self.stay_home, self.walk_home = self.ordered(problem.q_layout, problem.kv_layout)
        roles = problem.schedule.turned() if problem.queries_walk else problem.schedule
        self.roles = nearest_first(roles, problem.mask)
        self.stay_shards, self.walk_shards = self.roles.q, self.roles.kv
        self.num_steps = self.roles.num_steps
        self.stay_rows = cache(self._stay_rows)
        self._seen, self._parts = cache(self._find_seen), cache(self._find_parts)

    def ordered(self, stay: T, walk: T) -> tuple[T, T]:
        """(queries, keys) from (stay, walk); and back, since it is its own inverse."""
        return (walk, stay) if self.queries_walk else (stay, walk)

    def stay(self, rank: int, step: int) -> Ranges:
        """The rows of what stays with a rank that a step's tiles use."""
        return self._seen(rank, self.roles.origin(step, rank))[0]

    def walk(self, origin: int, step: int) -> Ranges:
        """The rows of a walker (by the rank that first holds it) that a step's tiles use."""
        return self._seen(self.roles.place(step, origin), origin)[1]

    def _stay_rows(self, rank: int) -> Ranges:
        """The rows of what stays with a rank that any tile uses."""
        used = {self.stay(rank, step) for step in range(self.num_steps)}
        return join(piece for rows in used for piece in rows)

    def _find_seen(self, rank: int, origin: int) -> tuple[Ranges, Ranges]:
        """The rows that tiles use where a rank meets a walker, of both sides."""
        queries, keys = self.ordered(self.stay_shards[rank], self.walk_shards[origin])
        found = seen(self._parts("q", queries), self._parts("k", keys), self.mask)
        return self.ordered(*found)

    def _find_parts(self, side: Literal["q", "k"], shards: Shards) -> Parts:
        """The rows of some shards, by part of the mask."""
        rows = join(piece for shard in shards for piece in self.homes[side][shard])
        return by_part(rows, self.mask, side)


def nearest_first(schedule: Schedule, mask: Mask) -> Schedule:
    """The same meetings, under a sliding window the near ones of either direction in a row.

    Under a window a shard is read by ranks next to its own: of a zigzag shard the first chunk by
    those after it, the last chunk by those before. Half of the hops are taken as they are; then
    one jump leads to the neighbour on the other side of where the keys began, and the other hops
    go on from there. In between, few ranks or none read anything, and a row crosses from host to
    host once. Schedules whose hops differ stay as they are.
    """
    ranks, steps = range(schedule.num_ranks), schedule.num_steps
    if mask.band.edges < 2 or steps < 3 or schedule.has_laps:
        return schedule

    def move(hops: int) -> tuple[int, ...]:
        return tuple(schedule.place(hops, rank) for rank in ranks)

    if move(steps) != tuple(ranks):  # walkers do not come round
        return schedule
    ahead = steps // 2
    behind = steps - ahead - 1
    hops = (schedule.hops[0],) * ahead + (move(behind),) + (move(steps - 1),) * (behind - 1)
    return Schedule(schedule.q, schedule.kv, hops)
