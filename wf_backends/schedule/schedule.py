"""Who meets whom, as plain data.

Pure: standard library only. A route is three fields; what is held at each step, the tiles, the
messages, their bytes and the way home are derived from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

from wf_backends.schedule.ranges import join

Shards = tuple[int, ...]  # shard b is what rank b owns
Hop = tuple[int, ...]  # rank r hands what it holds to rank hop[r]: a permutation


@dataclass(frozen=True, slots=True)
class Run:
    """Equal hops in a row, from a step on."""

    first: int
    cycles: tuple[tuple[Shards, int], ...]
    """For each rank the cycle of the hop that it is in, and its place in it."""
    places: Shards
    """Where at the first step the keys are that each rank first held."""
    origins: Shards
    """Which rank first held the keys that each rank holds then."""

    def after(self, rank: int, hops: int) -> int:
        """The rank that keys of this rank reach after so many hops; before, if negative."""
        cycle, index = self.cycles[rank]
        return cycle[(index + hops) % len(cycle)]


@dataclass(frozen=True)
class Schedule:
    """One exact way for query shards and key shards to meet.

    Rank r computes the rows of the query shards q[r]; it first holds the keys of the shards
    kv[r]; after step s it hands its keys to rank hops[s][r].
    """

    q: tuple[Shards, ...]
    kv: tuple[Shards, ...]
    hops: tuple[Hop, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.q)

    @property
    def num_steps(self) -> int:
        return len(self.hops) + 1

    def place(self, step: int, origin: int) -> int:
        """The rank at which the keys that rank `origin` first holds are at a step."""
        run = self._runs[bisect_right(self._firsts, step) - 1]
        return run.after(run.places[origin], step - run.first)

    def origin(self, step: int, rank: int) -> int:
        """Which rank first held the keys that a rank holds at a step."""
        run = self._runs[bisect_right(self._firsts, step) - 1]
        return run.origins[run.after(rank, run.first - step)]

    @cached_property
    def _runs(self) -> tuple[Run, ...]:
        """The hops, as few runs: a rank among thousands needs no table of all ranks and steps."""
        places, step, found = tuple(range(self.num_ranks)), 0, list[Run]()
        for hop, equal in groupby(self.hops or (places,)):
            run = Run(step, cycles(hop), places, inverse(places))
            count = len(tuple(equal))
            places, step = tuple(run.after(rank, count) for rank in places), step + count
            found.append(run)
        return tuple(found)

    @cached_property
    def _firsts(self) -> list[int]:
        return [run.first for run in self._runs]

    def holdings(self) -> tuple[tuple[Shards, ...], ...]:
        """The key shards that every rank holds at every step: [step][rank]."""
        found = [self.kv]
        for hop, equal in groupby(self.hops):
            back = inverse(hop)
            for _ in equal:
                found.append(tuple(map(found[-1].__getitem__, back)))
        return tuple(found)

    def gathers(self) -> tuple[bool, bool]:
        """Whether any rank brings (queries, keys) together that are not its own."""
        own = own_shards(self.num_ranks)
        return self.q != own, self.kv != own

    @property
    def has_laps(self) -> bool:
        """Whether hops differ: laps of near ranks, and jumps to others."""
        return len(self._runs) > 1

    def turned(self) -> Schedule:
        """The same meetings with the keys staying and the queries walking.

        In the result the field `q` names the shards that stay (keys) and `kv` those that walk
        (queries). If keys reach rank r from origin o at step s, queries of r now reach o.
        """
        if not self.has_laps:
            return Schedule(self.kv, self.q, tuple(map(inverse, self.hops[:1])) * len(self.hops))
        ranks = range(self.num_ranks)
        hops = (
            tuple(self.origin(step + 1, self.place(step, rank)) for rank in ranks)
            for step in range(len(self.hops))
        )
        return Schedule(self.kv, self.q, tuple(hops))


def inverse(hop: Hop) -> Hop:
    """The inverse permutation: the rank from which each rank receives."""
    back = [0] * len(hop)
    for rank, to in enumerate(hop):
        back[to] = rank
    return tuple(back)


def cycles(hop: Hop) -> tuple[tuple[Shards, int], ...]:
    """Of each rank, the cycle of the hop that it is on, and where."""
    found: list[tuple[Shards, int]] = [((), 0)] * len(hop)
    for first in range(len(hop)):
        if found[first][0]:
            continue
        cycle = [first]
        while (following := hop[cycle[-1]]) != first:
            cycle.append(following)
        for index, rank in enumerate(cycle):
            found[rank] = (tuple(cycle), index)
    return tuple(found)


def carriers(shards: Sequence[Shards]) -> list[list[int]]:
    """Which ranks' tuples name a shard: [shard] -> ranks, rising."""
    found: list[list[int]] = [[] for _ in shards]
    for rank, named in enumerate(shards):
        for shard in named:
            found[shard].append(rank)
    return found


def own_shards(n: int) -> tuple[Shards, ...]:
    """Every rank's own shard."""
    return tuple((rank,) for rank in range(n))


def check(schedule: Schedule) -> Schedule:
    """The schedule itself, once it is proved that every pair meets exactly once.

    Raises:
        ValueError: if a hop is no permutation of the ranks, or naming the (query shard, key
            shard) pairs that do not meet exactly once.
    """
    n = schedule.num_ranks
    for hop in {id(hop): hop for hop in schedule.hops}.values():
        if sorted(hop) != list(range(n)):
            raise ValueError(f"a hop must be a permutation of the {n} ranks, got {hop}")
    met: list[list[int]] = [[] for _ in range(n)]
    for queries, held in zip(schedule.q, zip(*schedule.holdings(), strict=True), strict=True):
        keys = list(chain.from_iterable(held))
        for i in queries:
            met[i] += keys
    wrong = ((i, keys) for i, keys in enumerate(met) if sorted(keys) != list(range(n)))
    bad = [(i, j, keys.count(j)) for i, keys in wrong for j in range(n) if keys.count(j) != 1]
    if bad:
        raise ValueError(
            "every (query shard, key shard) pair must meet exactly once; "
            f"{len(bad)} do not, as (query, key, times): {bad[:4]}"
        )
    return schedule


def render(schedule: Schedule) -> str:
    """The step x rank grid: which key shards meet which query shards, where and when."""
    held = schedule.holdings()
    head = ["rank", "queries", *(f"step {step}" for step in range(schedule.num_steps))]
    rows = [
        [str(rank), _names(schedule.q[rank]), *(_names(keys[rank]) for keys in held)]
        for rank in range(schedule.num_ranks)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def _names(shards: Shards) -> str:
    """Shard numbers, runs shortened: (0, 1, 2, 3, 6) -> "0-3,6"."""
    runs = join((shard, shard + 1) for shard in shards)
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs) or "-"
