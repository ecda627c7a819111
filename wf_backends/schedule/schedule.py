"""Who meets whom, as plain data.

A route is written down as the three fields of a `Schedule`. What ranks hold at each step, their
tiles and their messages are derived from these.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from wf_backends.schedule.ranges import join

Shards = tuple[int, ...]  # shard b is what rank b owns
Hop = tuple[int, ...]  # rank r sends what it holds to rank hop[r]: a permutation


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

    @cached_property
    def holders(self) -> list[array[int]]:
        """[step][origin] -> the rank that holds the keys that rank `origin` held at step 0."""
        # arrays, since with thousands of ranks there are millions
        holders = [array("i", range(self.num_ranks))]
        for hop in self.hops:
            holders.append(array("i", map(hop.__getitem__, holders[-1])))
        return holders

    @cached_property
    def origins(self) -> list[array[int]]:
        """[step][rank] -> the rank that held at step 0 the keys that the rank holds."""
        return [array("i", inverse(holders)) for holders in self.holders]

    def holdings(self) -> tuple[tuple[Shards, ...], ...]:
        """[step][rank] -> the key shards that the rank holds at the step."""
        return tuple(tuple(map(self.kv.__getitem__, origins)) for origins in self.origins)

    def gathers(self) -> tuple[bool, bool]:
        """Whether any rank needs (queries, keys) of other owners at step 0."""
        own = own_shards(self.num_ranks)
        return self.q != own, self.kv != own

    def swapped(self) -> Schedule:
        """The same meetings at the same steps, but keys stay and queries walk.

        In the result, `q` names the shards that stay (keys) and `kv` those that walk (queries).
        Where keys of origin o were at rank r at a step, queries of r are now at rank o.
        """
        if len({*self.hops}) == 1:
            return Schedule(self.kv, self.q, (inverse(self.hops[0]),) * len(self.hops))
        ranks = range(self.num_ranks)
        hops = (
            tuple(self.origins[step + 1][self.holders[step][rank]] for rank in ranks)
            for step in range(len(self.hops))
        )
        return Schedule(self.kv, self.q, tuple(hops))


def inverse(hop: Sequence[int]) -> Hop:
    """The inverse permutation: [rank] -> the rank from which it receives."""
    senders = [0] * len(hop)
    for sender, receiver in enumerate(hop):
        senders[receiver] = sender
    return tuple(senders)


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
