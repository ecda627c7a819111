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
from collections.abc import Iterator
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from wf_backends.lowering.problem import Reads
from wf_backends.lowering.program import Exchange, Parcels, Round, Stay, parcels
from wf_backends.schedule import (
    Ranges,
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


def bundle_sizes(count: int) -> list[int]:
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


class Delivery(NamedTuple):
    """How rows of one owner reach the ranks of one host that read them, and their results it.

    All by rank, in the order in which ranks are asked to fetch a row; the owner is none of them.
    """

    owner: int
    near: bool
    """Whether this is the owner's own host."""
    times: tuple[Times, Times]
    """In the first step, and in a later one."""
    needed: dict[int, Ranges]
    """What each of the ranks reads."""
    fetched: dict[int, Ranges]
    """Of that, what comes from the owner itself: all on its own host, else what no rank before
    this one reads. The rank that fetched a row passes it on to the others."""
    last: dict[int, int]
    """The step in which results are finished: the last one that uses a row; on another host that
    of all ranks, whose results are brought together."""


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
    """

    def __init__(self, reads: Reads, host_size: int) -> None:
        self.reads, self.host_size = reads, host_size
        self.shards, self.home, self.rows = reads.stay_shards, reads.stay_home, reads.stay_rows
        self.num_hosts = -(-len(self.shards) // host_size)
        self.carriers = carriers(self.shards)
        self.bundles = cache(self._bundles)
        self.delivery, self.deliveries = cache(self._delivery), cache(self._deliveries)

    def stay(self, rank: int) -> Stay:
        """The buffer of the rows that a rank brings together."""
        own, rows = self.home[rank], self.rows(rank)
        mine = intersect(rows, own)
        return Stay(
            size(own), size(rows), own_in_shard=locate(mine, own), own_in_buffer=locate(mine, rows)
        )

    def rounds(self, step: int, rank: int) -> Iterator[tuple[Ranges, Round]]:
        """(rows, messages) of every round."""
        moves = [move for one in self.deliveries(rank) for move in self._moves(step, rank, one)]
        if not moves:
            yield self.rows(rank), Round(())
            return
        computed = self._computed(step, rank)
        for at in range(max([*computed, *(move.at for move in moves)]) + 1):
            now = [move for move in moves if move.at == at]
            named = {one.exchange: self._exchange(rank, one.exchange, now) for one in now}
            yield computed.get(at, ()), Round((), **named)

    def _host(self, rank: int) -> int:
        return rank // self.host_size

    def _bundles(self, host: int) -> list[dict[int, int]]:
        """The owners on other hosts whose rows a host reads, those of the next hosts first.

        By owner the place on the host of who fetches its rows, if it reads them. Each place has
        owners that are neighbours, so that few kernel calls read what it fetched.
        """
        members = self.shards[host * self.host_size : (host + 1) * self.host_size]
        owners = {owner for shards in {*members} for owner in shards}
        hosts = {*map(self._host, owners)} - {host}
        far = sorted(hosts, key=partial(self._distance, host))
        found: list[dict[int, int]] = []
        for first, stop in pairwise(accumulate(bundle_sizes(len(far)), initial=0)):
            part = {*far[first:stop]}
            here = [owner for owner in sorted(owners) if self._host(owner) in part]
            found.append({o: at * self.host_size // len(here) for at, o in enumerate(here)})
        return found

    def _distance(self, host: int, other: int) -> int:
        """By what hosts take turns: all in pairs, where their number allows that by bits."""
        in_pairs = self.num_hosts & (self.num_hosts - 1) == 0
        return other ^ host if in_pairs else (other - host) % self.num_hosts

    def _times(self, host: int, bundle: int = 0) -> tuple[Times, Times]:
        """Of the rows of a bundle on a host: in the first step, and in a later one."""
        count, hosts = len(self.bundles(host)), self.host_size > 1
        return times(True, bundle, count, hosts), times(False, bundle, count, hosts)

    def _delivery(self, owner: int, host: int) -> Delivery:
        numbered = enumerate(self.bundles(host))
        bundle, place = next(((at, its[owner]) for at, its in numbered if owner in its), (0, 0))
        members = range(len(self.shards))[host * self.host_size : (host + 1) * self.host_size]
        in_turn = sorted(members, key=lambda rank: (rank - place) % self.host_size)
        home, near = self.home[owner], host == self._host(owner)
        read = {rank: intersect(self.rows(rank), home) for rank in in_turn if rank != owner}
        needed = {rank: rows for rank, rows in read.items() if rows}
        last = {rank: self._last(rank, home) for rank in needed}
        fetched = dict(needed)
        if not near:
            last = dict.fromkeys(needed, max(last.values(), default=0))
            before: Ranges = ()
            for rank, rows in needed.items():
                fetched[rank], before = subtract(rows, before), union(before, rows)
        return Delivery(owner, near, self._times(host, bundle), needed, fetched, last)

    def _last(self, rank: int, home: Ranges) -> int:
        """The last step in which a rank uses one of an owner's rows."""
        back = range(self.reads.num_steps - 1, -1, -1)
        return next(step for step in back if intersect(self.reads.stay(rank, step), home))

    def _deliveries(self, rank: int) -> list[Delivery]:
        """Those of the rank's own rows, then those of other owners' rows that it reads."""
        host, hosts = self._host(rank), sorted({*map(self._host, self.carriers[rank])})
        own = [self.delivery(rank, other) for other in hosts]
        others = [self.delivery(owner, host) for owner in self.shards[rank] if owner != rank]
        return own + [one for one in others if rank in one.needed]

    def _moves(self, step: int, rank: int, one: Delivery) -> Iterator[Move]:
        """What a rank sends or receives of an owner's rows, and of their results."""
        at = one.times[step > 0]
        here, home = (at.near, at.near) if one.near else (at.fetched, at.home)
        for reader in one.needed if rank == one.owner else [rank]:
            rows = one.fetched[reader]
            if rows and step == 0:
                yield Move(here, "fetch", one.owner, reader, rows)
            if rows and step == one.last[reader]:
                yield Move(home, "home", reader, one.owner, rows)
        if rank == one.owner or one.near:
            return
        pairs = [pair for to in one.needed if to != rank for pair in ((rank, to), (to, rank))]
        for source, target in pairs:
            rows = intersect(one.fetched[source], one.needed[target])
            if rows and step == 0:
                yield Move(at.fetched, "pass_on", source, target, rows)
            if rows and step == one.last[source]:
                yield Move(at.passed, "pass_back", target, source, rows)

    def _computed(self, step: int, rank: int) -> dict[int, Ranges]:
        """By round, the rows that are computed in it."""
        found: defaultdict[int, Ranges] = defaultdict(tuple)
        rest = self.rows(rank)
        for one in self.deliveries(rank):
            if rank == one.owner or (step and step != one.last[rank]):
                continue
            at, needed, fetched = one.times[step > 0], one.needed[rank], one.fetched[rank]
            here = at.near if one.near else at.fetched
            found[here] = union(found[here], fetched)
            found[at.passed] = union(found[at.passed], subtract(needed, fetched))
            rest = subtract(rest, needed)
        found[self._times(self._host(rank))[step > 0].rest] = rest
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
