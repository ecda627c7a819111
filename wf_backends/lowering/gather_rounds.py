"""The rounds of a step: in which order rows of the side that stays are used, and their messages.

A rank has its own rows from the start. In the first step it computes them first, while rows of
other owners arrive, one bundle of owners after another. In later steps its own rows come last,
while finished results are sent to other owners. Rounds of a step:

    first step    own rows | fetched 0 | fetched 1 | ...
    later steps   fetched 0 | fetched 1 | ... | all other rows

With a `host_size` above 1, a row crosses to each host once, since NICs are slower than links inside
hosts. One of its readers there fetches it from the owner, passes it on to the others while it
computes on it, and adds up their results before it sends them to the owner. "Near" are rows of
owners on the same host:

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
from wf_backends.lowering.program import Exchange, Round, Stay, parcels_of_peers
from wf_backends.schedule import Ranges, intersect, locate, ranks_by_shard, size, subtract, union

MAX_BUNDLES = 3
"""More owners (or hosts of owners) share bundles, so that the tiles of a round stay large."""


def bundle_sizes(count: int) -> list[int]:
    """How many of `count` owners are in each bundle."""
    n = min(count, MAX_BUNDLES)
    return [count // n + (1 if i < count % n else 0) for i in range(n)]


class BundleRounds(NamedTuple):
    """The indices of the rounds of a step that concern a bundle of owners."""

    rest: int  # tiles on own rows, and on rows of which nothing is sent in this step
    near: int  # tiles on rows of owners on the same host
    fetched: int  # tiles on rows that this rank fetched
    passed: int  # tiles on rows that another rank of the host fetched
    reduce: int  # after the tiles, results for fetched rows are sent to their owners


def rounds_of_bundle(first_step: bool, bundle: int, count: int, on_hosts: bool) -> BundleRounds:
    """The rounds of a bundle, of `count`. `on_hosts`: whether the host size is above 1."""
    extra = 1 if on_hosts else 0
    if first_step:
        fetched = 1 + extra + bundle
        return BundleRounds(0, 1, fetched, passed=fetched + extra, reduce=fetched + 2 * extra)
    near, fetched = count + extra, bundle + extra
    return BundleRounds(near + extra, near, fetched, passed=bundle, reduce=fetched)


class Delivery(NamedTuple):
    """How rows of one owner get to the ranks of one host that read them, and their results back.

    Dictionaries are by reader (the owner is none), in the order of who fetches first.
    """

    owner: int
    is_near: bool
    """Whether the host is the owner's."""
    rounds: tuple[BundleRounds, BundleRounds]
    """In the first step, and in a later one. On the owner's host, all rows are in round `near`."""
    needed: dict[int, Ranges]
    """The rows that each rank reads."""
    fetched: dict[int, Ranges]
    """Of these, the rows that each rank gets from the owner. On the owner's host these are all; on
    another host those that no rank before it reads. The others are passed on by who fetched."""
    last_step: dict[int, int]
    """The step after which results are finished: the last one in which the rank reads any of the
    rows. On another host the last one of all its ranks, since their results are added up there."""


class ExchangePart(NamedTuple):
    """Rows (positions) that one rank sends to another in an exchange of a round."""

    round_index: int
    exchange: str
    sender: int
    receiver: int
    rows: Ranges


class GatherRounds:
    """The rounds of all ranks. Rank r is on host r // host_size; size 1 is as without hosts."""

    def __init__(self, reads: Reads, host_size: int) -> None:
        self.reads, self.host_size = reads, host_size
        self.shards, self.layout, self.rows = reads.stay_shards, reads.stay_layout, reads.stay_rows
        self.num_hosts = -(-len(self.shards) // host_size)
        self._readers = ranks_by_shard(self.shards)
        self.bundles = cache(self._bundles)
        self.delivery, self.deliveries = cache(self._delivery), cache(self._deliveries)

    def stay(self, rank: int) -> Stay:
        """The buffer of the rows that a rank reads of the side that stays."""
        own, held = self.layout[rank], self.rows(rank)
        own_held = intersect(held, own)
        return Stay(size(own), size(held), locate(own_held, own), locate(own_held, held))

    def rounds(self, step: int, rank: int) -> Iterator[tuple[Ranges, Round]]:
        """(rows that are computed, messages) of every round of a step."""
        deliveries = self.deliveries(rank)
        parts = [part for delivery in deliveries for part in self._parts(step, rank, delivery)]
        if not parts:
            yield self.rows(rank), Round(())
            return
        computed = self._computed_rows(step, rank)
        num_rounds = max([*computed, *(part.round_index for part in parts)]) + 1
        for index in range(num_rounds):
            parts_of_round = [part for part in parts if part.round_index == index]
            names = {part.exchange for part in parts_of_round}
            exchanges = {name: self._exchange(rank, name, parts_of_round) for name in names}
            yield computed.get(index, ()), Round((), **exchanges)

    def _host(self, rank: int) -> int:
        return rank // self.host_size

    def _bundles(self, host: int) -> list[dict[int, int]]:
        """The owners on other hosts whose rows a host reads, in bundles, the next hosts first.

        Each bundle maps an owner to the index on this host of the rank that fetches first from it.
        An index serves neighbouring owners, so that few kernel calls read the rows it fetched.
        """
        shards_by_rank = self.shards[host * self.host_size : (host + 1) * self.host_size]
        owners = sorted({owner for shards in {*shards_by_rank} for owner in shards})
        other_hosts = {*map(self._host, owners)} - {host}
        hosts = sorted(other_hosts, key=partial(self._distance, host))
        bundles: list[dict[int, int]] = []
        for first, stop in pairwise(accumulate(bundle_sizes(len(hosts)), initial=0)):
            hosts_of_bundle = {*hosts[first:stop]}
            bundle = [owner for owner in owners if self._host(owner) in hosts_of_bundle]
            bundles.append({o: i * self.host_size // len(bundle) for i, o in enumerate(bundle)})
        return bundles

    def _distance(self, host: int, other: int) -> int:
        """The order in which hosts fetch: in pairs (by xor) if their number is a power of two."""
        in_pairs = self.num_hosts & (self.num_hosts - 1) == 0
        return other ^ host if in_pairs else (other - host) % self.num_hosts

    def _rounds_of_bundle(self, first_step: bool, host: int, bundle: int = 0) -> BundleRounds:
        count = len(self.bundles(host))
        return rounds_of_bundle(first_step, bundle, count, on_hosts=self.host_size > 1)

    def _delivery(self, owner: int, host: int) -> Delivery:
        bundle, first_index = 0, 0
        for i, first_indices in enumerate(self.bundles(host)):
            if owner in first_indices:
                bundle, first_index = i, first_indices[owner]
        ranks = range(len(self.shards))[host * self.host_size : (host + 1) * self.host_size]
        in_order = sorted(ranks, key=lambda rank: (rank - first_index) % self.host_size)
        own, is_near = self.layout[owner], host == self._host(owner)
        read = {rank: intersect(self.rows(rank), own) for rank in in_order if rank != owner}
        needed = {rank: rows for rank, rows in read.items() if rows}
        last_step = {rank: self._last_step(rank, own) for rank in needed}
        fetched = dict(needed)
        first, later = (
            self._rounds_of_bundle(is_first, host, bundle) for is_first in (True, False)
        )
        if is_near:
            first = first._replace(fetched=first.near, reduce=first.near)
            later = later._replace(fetched=later.near, reduce=later.near)
        else:
            last_step = dict.fromkeys(needed, max(last_step.values(), default=0))
            fetched_before: Ranges = ()
            for rank, rows in needed.items():
                fetched[rank] = subtract(rows, fetched_before)
                fetched_before = union(fetched_before, rows)
        return Delivery(owner, is_near, (first, later), needed, fetched, last_step)

    def _last_step(self, rank: int, rows: Ranges) -> int:
        """The last step in which a rank reads any of the rows, which some step does."""
        step = self.reads.num_steps - 1
        while not intersect(self.reads.stay_rows_in_step(rank, step), rows):
            step -= 1
        return step

    def _deliveries(self, rank: int) -> list[Delivery]:
        """Those of the rank's own rows to all hosts, then those of other owners' rows to it."""
        host, hosts = self._host(rank), sorted({*map(self._host, self._readers[rank])})
        own = [self.delivery(rank, other) for other in hosts]
        others = [self.delivery(owner, host) for owner in self.shards[rank] if owner != rank]
        return own + [delivery for delivery in others if rank in delivery.needed]

    def _parts(self, step: int, rank: int, delivery: Delivery) -> Iterator[ExchangePart]:
        """What a rank sends and receives of an owner's rows, and of results for them."""
        owner, fetched = delivery.owner, delivery.fetched
        rounds = delivery.rounds[min(step, 1)]
        for reader in delivery.needed if rank == owner else [rank]:
            rows = fetched[reader]
            if rows and step == 0:
                yield ExchangePart(rounds.fetched, "fetch", owner, reader, rows)
            if rows and step == delivery.last_step[reader]:
                yield ExchangePart(rounds.reduce, "reduce", reader, owner, rows)
        if rank == owner or delivery.is_near:
            return
        others = [reader for reader in delivery.needed if reader != rank]
        pairs = [pair for other in others for pair in ((rank, other), (other, rank))]
        for fetcher, reader in pairs:
            rows = intersect(fetched[fetcher], delivery.needed[reader])
            if rows and step == 0:
                yield ExchangePart(rounds.fetched, "pass_on", fetcher, reader, rows)
            if rows and step == delivery.last_step[fetcher]:
                yield ExchangePart(rounds.passed, "pass_back", reader, fetcher, rows)

    def _computed_rows(self, step: int, rank: int) -> dict[int, Ranges]:
        """Round index -> the rows that are computed in the round."""
        computed: defaultdict[int, Ranges] = defaultdict(tuple)
        rest = self.rows(rank)
        for delivery in self.deliveries(rank):
            if rank == delivery.owner or (step > 0 and step != delivery.last_step[rank]):
                continue
            rounds = delivery.rounds[min(step, 1)]
            needed, fetched = delivery.needed[rank], delivery.fetched[rank]
            passed = subtract(needed, fetched)
            computed[rounds.fetched] = union(computed[rounds.fetched], fetched)
            computed[rounds.passed] = union(computed[rounds.passed], passed)
            rest = subtract(rest, needed)
        computed[self._rounds_of_bundle(step == 0, self._host(rank)).rest] = rest
        return computed

    def _exchange(self, rank: int, name: str, parts: list[ExchangePart]) -> Exchange:
        """An exchange of a round: all rows that go to a peer together, or come from it."""
        own, held = self.layout[rank], self.rows(rank)
        sent, received = defaultdict[int, Ranges](tuple), defaultdict[int, Ranges](tuple)
        for part in parts:
            if part.exchange == name and part.sender == rank:
                sent[part.receiver] = union(sent[part.receiver], part.rows)
            elif part.exchange == name:
                received[part.sender] = union(received[part.sender], part.rows)
        return Exchange(
            parcels_of_peers(rank, sent.items(), own if name == "fetch" else held),
            parcels_of_peers(rank, received.items(), own if name == "reduce" else held),
        )
