"""A schedule together with layouts and a mask, and the rows that tiles read in each step.

One side stays (a rank gathers its rows once, and uses them in all steps), the other walks. In the
forward, keys walk; in the backward, keys or queries.
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
    """Everything from which the programs of all ranks are derived."""

    schedule: Schedule
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    queries_walk: bool = False
    kept: bool = False
    """Whether the first gather brings all rows of a walker that any step reads, for another pass
    that keeps them and uses them again."""
    host_size: int = 1
    """The number of neighbouring ranks on a host. A row of the side that stays crosses to the host
    once, even if several of its ranks read it."""
    joins_ranges: bool = True
    """Whether several ranges of rows may be one causal tile (see `make_tiles`)."""


class Reads:
    """The rows (positions) that tiles read of each side.

    Computed on demand and cached: one rank of thousands asks only for its own part. A walker is
    named by its origin, the rank that holds it at step 0.

    Attributes:
        schedule: field `q` names the shards that stay, `kv` those that walk.
        stay_shards, walk_shards: [rank] -> the shards that it gathers, and that it holds at step 0.
        stay_layout, walk_layout: the layouts of both sides.
    """

    def __init__(self, problem: Problem) -> None:
        self.mask, self.queries_walk = problem.mask, problem.queries_walk
        self.joins_ranges = problem.joins_ranges
        self._layouts = {"q": problem.q_layout, "k": problem.kv_layout}
        self.stay_layout, self.walk_layout = self.ordered(problem.q_layout, problem.kv_layout)
        schedule = problem.schedule
        self.schedule = schedule.swapped() if problem.queries_walk else schedule
        self.stay_shards, self.walk_shards = self.schedule.q, self.schedule.kv
        self.num_steps = self.schedule.num_steps
        self.stay_rows = cache(self._stay_rows)
        self._rows_of_pair, self._parts = cache(self._find_rows_of_pair), cache(self._find_parts)

    def ordered(self, stay: T, walk: T) -> tuple[T, T]:
        """(queries, keys) from (stay, walk). Also (stay, walk) from (queries, keys)."""
        return (walk, stay) if self.queries_walk else (stay, walk)

    def stay_rows_in_step(self, rank: int, step: int) -> Ranges:
        """The rows of the side that stays which a rank's tiles read in a step."""
        return self._rows_of_pair(rank, self.schedule.origins[step][rank])[0]

    def walker_rows(self, origin: int, step: int) -> Ranges:
        """The rows of a walker that tiles read in a step."""
        return self._rows_of_pair(self.schedule.holders[step][origin], origin)[1]

    def _stay_rows(self, rank: int) -> Ranges:
        """The rows of the side that stays which a rank's tiles read in any step."""
        distinct = {self.stay_rows_in_step(rank, step) for step in range(self.num_steps)}
        return join(piece for rows in distinct for piece in rows)

    def _find_rows_of_pair(self, rank: int, origin: int) -> tuple[Ranges, Ranges]:
        """(rows that stay, rows of the walker) that tiles read where a rank meets a walker."""
        queries, keys = self.ordered(self.stay_shards[rank], self.walk_shards[origin])
        rows = seen(self._parts("q", queries), self._parts("k", keys), self.mask)
        return self.ordered(*rows)

    def _find_parts(self, side: Literal["q", "k"], shards: Shards) -> Parts:
        """The rows of these shards, by part of the mask."""
        rows = join(piece for shard in shards for piece in self._layouts[side][shard])
        return by_part(rows, self.mask, side)
