"""In which order a rank computes the rows that stay with it, and what travels in between.

Pure: standard library only. A rank has its own rows from the start. In the first step they are
computed first, while those of other owners arrive, bundle by bundle of owners. In later steps own
rows come last, while results that are finished are sent to other owners:

    first step    own rows | fetched 0 | fetched 1 | ...
    later steps   fetched 0 | fetched 1 | ... | all other rows

With a `host_size` above 1 a row crosses to each host once, as NICs carry it: one of its readers
there gets it from the owner, passes it on to the others while it computes on it, and adds up their
results before it sends them to the owner. Rows of owners on this host come between:

    first step    own rows | near | fetched 0 | fetched 1, passed on 0 | passed on 1
    later steps   passed on 0 | fetched 0, passed on 1 | fetched 1 | near | all other rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from wf_backends.lowering.program import Exchange, Parcels, Round, Stay, parcels
from wf_backends.schedule import (
    Layout,
    Ranges,
    Shards,
    carriers,
    intersect,
    join,
    locate,
    size,
    subtract,
    union,
)

MAX_ROUNDS = 3
"""Bundles of one step: more owners (or hosts of owners) share them, so that kernels still have
something to do."""


def bundles(count: int) -> list[int]:
    """How many of `count` owners share each bundle."""
    rounds = min(count, MAX_ROUNDS)
    return [count // rounds + (at < count % rounds) for at in range(rounds)] if count else []


class Times(NamedTuple):
    """In which round of a step something happens, to the rows of one bundle of owners."""

    rest: int
    near: int
    """Owners on the same host."""
    fetched: int
    passed: int
    home: int


def times(first: bool, bundle: int, count: int, hosts: bool = True) -> Times:
    """The times of a bundle, of `count`, in the first step or a later one.

    Args:
        hosts: whether ranks have neighbours on their host, to which rows are passed on.
    """
    if first:
        fetched = 1 + hosts + bundle
        return Times(0, 1, fetched, fetched + hosts, fetched + 2 * hosts)
    return Times(count + 2 * hosts, count + hosts, bundle + hosts, bundle, bundle + hosts)


class Move(NamedTuple):
    """Rows (positions) that one rank sends to another in a round, in one of its exchanges."""

    at: int
    exchange: str
    source: int
    target: int
    rows: Ranges


class GatherRounds:
    """The rounds of all ranks; rank r is on host r // host_size.

    Args:
        host_size: 1 = a row is fetched by each of its readers.
        shards: whose rows each rank brings together. home: the rows that each rank owns.
        rows: rank -> those that it brings together. met: (step, rank) -> those that it uses.
    """

    def __init__(
        self,
        host_size: int,
        shards: tuple[Shards, ...],
        num_steps: int,
        home: Layout,
        rows: Callable[[int], Ranges],
        met: Callable[[int, int], Ranges],
    ) -> None:
        self.host_size, self.shards, self.num_steps, self.home = host_size, shards, num_steps, home
        self.rows, self.met = rows, met
        self.num_hosts = -(-len(shards) // host_size)
        self.carriers = carriers(shards)
        self.bundles, self.places = cache(self._bundles), cache(self._places)
        self.last, self.last_of_host = cache(self._last), cache(self._last_of_host)
        self.holders, self.readers = cache(self._holders), cache(self._readers)
        self.needed, self.fetched = cache(self._needed), cache(self._fetched)

    def stay(self, rank: int) -> Stay:
        """The buffer of the rows that a rank brings together."""
        mine = intersect(self.rows(rank), self.home[rank])
        return Stay(
            shard_rows=size(self.home[rank]),
            num_rows=size(self.rows(rank)),
            mine=locate(mine, self.home[rank]),
            at=locate(mine, self.rows(rank)),
        )

    def rounds(self, step: int, rank: int) -> Iterator[tuple[Ranges, Round]]:
        """(rows, messages) of every round."""
        moves = [move for pair in self._pairs(rank) for move in self._moves(step, rank, *pair)]
        if not moves:
            yield self.rows(rank), Round(())
            return
        computed = self._computed(step, rank)
        last = max([*computed, *(move.at for move in moves)])
        for at in range(last + 1):
            now = [move for move in moves if move.at == at]
            named = {one.exchange: self._exchange(rank, one.exchange, now) for one in now}
            yield computed.get(at, ()), Round((), **named)

    def _host(self, rank: int) -> int:
        return rank // self.host_size

    def _bundles(self, host: int) -> list[list[int]]:
        """The owners on other hosts whose rows a host reads: those of the next hosts first."""
        members = self.shards[host * self.host_size : (host + 1) * self.host_size]
        owners = {owner for shards in {*members} for owner in shards}
        hosts = {*map(self._host, owners)} - {host}
        far = sorted(hosts, key=partial(self._distance, host))
        edges = accumulate(bundles(len(far)), initial=0)
        parts = ({*far[first:stop]} for first, stop in pairwise(edges))
        return [[owner for owner in sorted(owners) if self._host(owner) in part] for part in parts]

    def _distance(self, host: int, other: int) -> int:
        """By what hosts take turns: all in pairs, where their number allows that by bits."""
        in_pairs = self.num_hosts & (self.num_hosts - 1) == 0
        return other ^ host if in_pairs else (other - host) % self.num_hosts

    def _places(self, host: int) -> dict[int, tuple[int, int]]:
        """By owner: its bundle, and the place on the host of who fetches its rows if it reads them.

        Each place has owners that are neighbours, so that few kernel calls read what it fetched.
        """
        return {
            owner: (bundle, at * self.host_size // len(owners))
            for bundle, owners in enumerate(self.bundles(host))
            for at, owner in enumerate(owners)
        }

    def _times(self, step: int, owner: int, host: int) -> Times:
        """Of an owner's rows on a host."""
        bundle, _ = self.places(host).get(owner, (0, 0))
        return times(step == 0, bundle, len(self.bundles(host)), self.host_size > 1)

    def _readers(self, owner: int, host: int) -> list[int]:
        """The ranks of a host that read rows of an owner; who fetches them first."""
        members = range(host * self.host_size, min((host + 1) * self.host_size, len(self.shards)))
        found = [rank for rank in members if self._shares(rank, owner)]
        _, place = self.places(host).get(owner, (0, 0))
        return sorted(found, key=lambda rank: (rank - place) % self.host_size)

    def _shares(self, rank: int, owner: int) -> bool:
        """Whether the rank holds rows of this other owner."""
        return owner != rank and bool(self.needed(rank, owner))

    def _holders(self, rank: int) -> list[int]:
        """The other ranks that hold rows of this one."""
        return [other for other in self.carriers[rank] if self._shares(other, rank)]

    def _last(self, rank: int, owner: int) -> int:
        """The last step that uses a row of the owner's which the rank holds."""
        back, home = range(self.num_steps - 1, -1, -1), self.home[owner]
        return next(step for step in back if intersect(self.met(step, rank), home))

    def _needed(self, rank: int, owner: int) -> Ranges:
        """The rows of an owner that a rank reads."""
        return intersect(self.rows(rank), self.home[owner])

    def _fetched(self, rank: int, owner: int) -> Ranges:
        """Those that it gets from the owner itself: that no reader before it on its host reads."""
        host, rows = self._host(rank), self.needed(rank, owner)
        if host == self._host(owner):
            return rows
        readers = self.readers(owner, host)
        for other in readers[: readers.index(rank)]:
            rows = subtract(rows, self.needed(other, owner))
        return rows

    def _passed(self, rank: int, to: int, owner: int) -> Ranges:
        """Those that it passes on to another rank of its host."""
        if rank == to or self._host(rank) == self._host(owner):
            return ()
        return intersect(self.fetched(rank, owner), self.needed(to, owner))

    def _last_of_host(self, owner: int, host: int) -> int:
        """The last step in which a host uses a row of the owner's; on its own host see `last`."""
        return max(self.last(rank, owner) for rank in self.readers(owner, host))

    def _leaves(self, step: int, rank: int, owner: int) -> bool:
        """Whether a rank's results for an owner's rows are finished in this step."""
        host = self._host(rank)
        if host == self._host(owner):
            return self.last(rank, owner) == step
        return self.last_of_host(owner, host) == step

    def _pairs(self, rank: int) -> Iterator[tuple[int, int]]:
        """(owner, host that reads it) wherever this rank is the owner, or a reader."""
        host = self._host(rank)
        yield from ((rank, other) for other in sorted({*map(self._host, self.holders(rank))}))
        yield from ((owner, host) for owner in self.shards[rank] if self._shares(rank, owner))

    def _moves(self, step: int, rank: int, owner: int, host: int) -> Iterator[Move]:
        """What a rank sends or receives of an owner's rows, and of their results."""
        near, readers = host == self._host(owner), self.readers(owner, host)
        at = self._times(step, owner, host)
        here, home = (at.near, at.near) if near else (at.fetched, at.home)
        for reader in readers if rank == owner else [rank]:
            rows, leaves = self.fetched(reader, owner), self._leaves(step, reader, owner)
            if step == 0 and rows:
                yield Move(here, "fetch", owner, reader, rows)
            if leaves and rows:
                yield Move(home, "home", reader, owner, rows)
        pairs = [] if rank == owner else [(rank, to) for to in readers]
        for one, other in [*pairs, *(pair[::-1] for pair in pairs)]:
            rows = self._passed(one, other, owner)
            if step == 0 and rows:
                yield Move(at.fetched, "pass_on", one, other, rows)
            if rows and self._leaves(step, one, owner):
                yield Move(at.passed, "pass_back", other, one, rows)

    def _computed(self, step: int, rank: int) -> dict[int, Ranges]:
        """By round, the rows that are computed in it."""
        found: defaultdict[int, Ranges] = defaultdict(tuple)
        rest, host = self.rows(rank), self._host(rank)
        for owner in self.shards[rank]:
            if not (self._shares(rank, owner) and (step == 0 or self._leaves(step, rank, owner))):
                continue
            at, needed = self._times(step, owner, host), self.needed(rank, owner)
            fetched = self.fetched(rank, owner)
            here = at.near if host == self._host(owner) else at.fetched
            found[here] = union(found[here], fetched)
            found[at.passed] = union(found[at.passed], subtract(needed, fetched))
            rest = subtract(rest, needed)
        found[self._times(step, rank, host).rest] = rest
        return found

    def _exchange(self, rank: int, name: str, moves: list[Move]) -> Exchange:
        """One exchange of a round: all rows that go to a peer, or come from it, together."""
        own, rows = self.home[rank], self.rows(rank)
        give, take = {"fetch": (own, rows), "home": (rows, own)}.get(name, (rows, rows))
        return Exchange(
            _parcels([(m.target, m.rows) for m in moves if m[1:3] == (name, rank)], give),
            _parcels([(m.source, m.rows) for m in moves if (m[1], m[3]) == (name, rank)], take),
        )


def _parcels(found: list[tuple[int, Ranges]], held: Ranges) -> Parcels:
    by_peer: defaultdict[int, list[Ranges]] = defaultdict(list)
    for peer, rows in found:
        by_peer[peer].append(rows)
    together = ((peer, join(r for rows in by_peer[peer] for r in rows)) for peer in by_peer)
    return tuple(parcel for peer, rows in together for parcel in parcels(peer, rows, held))
