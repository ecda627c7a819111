"""Where walkers are at every step, and who names a shard, of any number of ranks.

Pure: standard library only. A rank among thousands looks at its own part: no table of all ranks
and steps, where one can do without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from wf_backends.schedule import Schedule, Shards


class Tracks(Protocol):
    """The walkers' ways through a schedule."""

    def place(self, step: int, origin: int) -> int:
        """The rank at which the walker that rank `origin` first holds is at a step."""
        ...

    def origin(self, step: int, rank: int) -> int:
        """Which rank first held what a rank holds at a step."""
        ...

    def step(self, origin: int, rank: int) -> int:
        """The step in which a walker, by who first held it, is at a rank that it comes to."""
        ...


class Cycles:
    """Tracks of a schedule whose hops are all the same: walkers go round the hop's cycles."""

    def __init__(self, schedule: Schedule) -> None:
        hop = schedule.hops[0] if schedule.hops else tuple(range(schedule.num_ranks))
        self._at: list[tuple[list[int], int]] = [([], 0)] * schedule.num_ranks
        for first in range(schedule.num_ranks):
            if self._at[first][0]:
                continue
            cycle = [first]
            while (following := hop[cycle[-1]]) != first:
                cycle.append(following)
            for index, rank in enumerate(cycle):
                self._at[rank] = (cycle, index)

    def place(self, step: int, origin: int) -> int:
        cycle, index = self._at[origin]
        return cycle[(index + step) % len(cycle)]

    def origin(self, step: int, rank: int) -> int:
        cycle, index = self._at[rank]
        return cycle[(index - step) % len(cycle)]

    def step(self, origin: int, rank: int) -> int:
        cycle, index = self._at[rank]
        return (index - self._at[origin][1]) % len(cycle)


class Tables:
    """Tracks of any schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._places, self._origins = schedule.places(), schedule.origins()

    def place(self, step: int, origin: int) -> int:
        return self._places[step][origin]

    def origin(self, step: int, rank: int) -> int:
        return self._origins[step][rank]

    def step(self, origin: int, rank: int) -> int:
        return next(step for step, at in enumerate(self._places) if at[origin] == rank)


def tracks(schedule: Schedule) -> Tracks:
    """The walkers' ways through a schedule, in its cheapest form."""
    return Tables(schedule) if schedule.has_laps else Cycles(schedule)


def carriers(shards: Sequence[Shards]) -> list[list[int]]:
    """Which ranks' tuples name a shard: [shard] -> ranks, rising."""
    naming: defaultdict[Shards, list[int]] = defaultdict(list)  # ranks that gather name the same
    for rank, named in enumerate(shards):
        naming[named].append(rank)
    found: list[list[int]] = [[] for _ in shards]
    for named, ranks in naming.items():
        for shard in named:
            found[shard] = sorted(found[shard] + ranks) if found[shard] else ranks
    return found
