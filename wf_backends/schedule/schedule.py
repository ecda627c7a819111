"""Who meets whom, as plain data.

A route is written down as the three fields of a `Schedule`. What ranks hold at each step, their
tiles and their messages are derived from these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

from wf_backends.schedule.ranges import join

Shards = tuple[int, ...]  # shard b is what rank b owns
Hop = tuple[int, ...]  # rank r sends what it holds to rank hop[r]: a permutation


@dataclass(frozen=True, slots=True)
class EqualHops:
    """Consecutive equal hops, the first of them after step `first_step`."""

    first_step: int
    cycles: tuple[tuple[Hop, int], ...]
    """[rank] -> (the cycle of the hop that the rank is on, its index there)."""
    holders: tuple[int, ...]
    """[origin] -> the rank that holds the keys of rank `origin` at `first_step`."""
    origins: tuple[int, ...]
    """[rank] -> the rank that held at step 0 what this rank holds at `first_step`."""

    def after(self, rank: int, hops: int) -> int:
        """The rank that a rank's keys reach after `hops` hops, or came from if negative."""
        cycle, index = self.cycles[rank]
        return cycle[(index + hops) % len(cycle)]


@dataclass(frozen=True)
class Schedule:
    """One exact way for query shards and key shards to meet.

    Rank r computes the rows of the query shards q[r]. At step 0 it holds the keys of the shards
    kv[r]. After step s it sends the keys that it holds to rank hops[s][r].
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

    def holder(self, step: int, origin: int) -> int:
        """The rank that holds at a step the keys that rank `origin` held at step 0."""
        equal = self._equal_hops[bisect_right(self._first_steps, step) - 1]
        return equal.after(equal.holders[origin], step - equal.first_step)

    def origin(self, step: int, rank: int) -> int:
        """The rank that held at step 0 the keys that a rank holds at a step."""
        equal = self._equal_hops[bisect_right(self._first_steps, step) - 1]
        return equal.origins[equal.after(rank, equal.first_step - step)]

    @cached_property
    def _equal_hops(self) -> tuple[EqualHops, ...]:
        """Not a table [step][rank], which would be large with thousands of ranks."""
        groups = list[EqualHops]()
        step, holders = 0, tuple(range(self.num_ranks))
        for hop, equal_hops in groupby(self.hops or (holders,)):
            equal = EqualHops(step, cycles(hop), holders, inverse(holders))
            groups.append(equal)
            count = len(tuple(equal_hops))
            step += count
            holders = tuple(equal.after(rank, count) for rank in holders)
        return tuple(groups)

    @cached_property
    def _first_steps(self) -> list[int]:
        return [equal.first_step for equal in self._equal_hops]

    def holdings(self) -> tuple[tuple[Shards, ...], ...]:
        """[step][rank] -> the key shards that the rank holds at the step."""
        holdings = [self.kv]
        for hop, equal_hops in groupby(self.hops):
            senders = inverse(hop)
            for _ in equal_hops:
                holdings.append(tuple(map(holdings[-1].__getitem__, senders)))
        return tuple(holdings)

    def gathers(self) -> tuple[bool, bool]:
        """Whether any rank needs (queries, keys) of other owners at step 0."""
        own = own_shards(self.num_ranks)
        return self.q != own, self.kv != own

    def swapped(self) -> Schedule:
        """The same meetings at the same steps, but keys stay and queries walk.

        In the result, `q` names the shards that stay (keys) and `kv` those that walk (queries).
        Where keys of origin o were at rank r at a step, queries of r are now at rank o.
        """
        if len(self._equal_hops) == 1:  # without laps
            return Schedule(self.kv, self.q, tuple(map(inverse, self.hops[:1])) * len(self.hops))
        ranks = range(self.num_ranks)
        hops = (
            tuple(self.origin(step + 1, self.holder(step, rank)) for rank in ranks)
            for step in range(len(self.hops))
        )
        return Schedule(self.kv, self.q, tuple(hops))


def inverse(hop: Hop) -> Hop:
    """The inverse permutation: [rank] -> the rank from which it receives."""
    senders = [0] * len(hop)
    for sender, receiver in enumerate(hop):
        senders[receiver] = sender
    return tuple(senders)


def cycles(hop: Hop) -> tuple[tuple[Hop, int], ...]:
    """[rank] -> (the cycle of the permutation that the rank is on, its index there)."""
    cycle_of: list[tuple[Hop, int]] = [((), 0)] * len(hop)
    for first in range(len(hop)):
        if cycle_of[first][0]:
            continue
        cycle = [first]
        while (following := hop[cycle[-1]]) != first:
            cycle.append(following)
        for index, rank in enumerate(cycle):
            cycle_of[rank] = (tuple(cycle), index)
    return tuple(cycle_of)


def ranks_by_shard(shards_by_rank: Sequence[Shards]) -> list[list[int]]:
    """[shard] -> the ranks that hold it, in rising order."""
    ranks: list[list[int]] = [[] for _ in shards_by_rank]
    for rank, shards in enumerate(shards_by_rank):
        for shard in shards:
            ranks[shard].append(rank)
    return ranks


def own_shards(n: int) -> tuple[Shards, ...]:
    """[rank] -> its own shard alone."""
    return tuple((rank,) for rank in range(n))


def check(schedule: Schedule) -> Schedule:
    """Return the schedule if every (query shard, key shard) pair meets exactly once.

    Raises:
        ValueError: if a hop is no permutation of the ranks, or if pairs do not meet exactly once:
            names them.
    """
    n = schedule.num_ranks
    for hop in {id(hop): hop for hop in schedule.hops}.values():
        if sorted(hop) != list(range(n)):
            raise ValueError(f"a hop must be a permutation of the {n} ranks, got {hop}")
    keys_met: list[list[int]] = [[] for _ in range(n)]  # by query shard
    holdings_by_rank = zip(*schedule.holdings(), strict=True)
    for queries, held_by_step in zip(schedule.q, holdings_by_rank, strict=True):
        keys = list(chain.from_iterable(held_by_step))
        for query in queries:
            keys_met[query] += keys
    wrong = ((i, keys) for i, keys in enumerate(keys_met) if sorted(keys) != list(range(n)))
    bad = [(i, j, keys.count(j)) for i, keys in wrong for j in range(n) if keys.count(j) != 1]
    if bad:
        raise ValueError(
            "every (query shard, key shard) pair must meet exactly once; "
            f"{len(bad)} do not, as (query, key, times): {bad[:4]}"
        )
    return schedule


def render(schedule: Schedule) -> str:
    """The step x rank grid: which key shards meet which query shards, where and when."""
    holdings = schedule.holdings()
    head = ["rank", "queries", *(f"step {step}" for step in range(schedule.num_steps))]
    rows = [
        [str(rank), _names(schedule.q[rank]), *(_names(keys[rank]) for keys in holdings)]
        for rank in range(schedule.num_ranks)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def _names(shards: Shards) -> str:
    """Shard numbers as text, ranges shortened: (0, 1, 2, 3, 6) -> "0-3,6"."""
    runs = join((shard, shard + 1) for shard in shards)
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs) or "-"
