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
from itertools import accumulate, pairwise, product
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


class DeliveryRounds(NamedTuple):
    """The indices of the rounds of a step that concern a delivery."""

    rest: int  # tiles on own rows, and on rows of which nothing is sent in this step
    fetched: int  # tiles on rows that this rank fetched
    passed: int  # tiles on rows that another rank of the host fetched
    reduce: int  # after the tiles, results for fetched rows are sent to their owners


def delivery_rounds(
    first_step: bool, bundle: int | None, num_bundles: int, on_hosts: bool
) -> DeliveryRounds:
    """The rounds of a delivery from owners in a bundle, or None = near ones; see the module.

    `on_hosts`: whether the host size is above 1.
    """
    extra = 1 if on_hosts else 0
    rest, near = (0, 1) if first_step else (num_bundles + 2 * extra, num_bundles + 1)
    if bundle is None:
        return DeliveryRounds(rest, fetched=near, passed=near, reduce=near)
    if first_step:
        fetched = 1 + extra + bundle
        return DeliveryRounds(rest, fetched, passed=fetched + extra, reduce=fetched + 2 * extra)
    return DeliveryRounds(rest, bundle + extra, passed=bundle, reduce=bundle + extra)


class Transfer(NamedTuple):
    """Rows (positions) that one rank sends to another in an exchange of a round."""

    round_index: int
    exchange: str
    sender: int
    receiver: int
    rows: Ranges


class Delivery(NamedTuple):
    """How rows of one owner get to ranks of one host that read them, and their results back.

    On the owner's own host each reader has a delivery for itself, on any other all readers share
    one. Dictionaries are by reader, in the order of who fetches first.
    """

    owner: int
    rounds: tuple[DeliveryRounds, DeliveryRounds]
    """In the first step, and in a later one."""
    needed: dict[int, Ranges]
    """The rows that each rank reads."""
    fetched: dict[int, Ranges]
    """Of these, the rows that each rank gets from the owner and passes on to the other readers:
    those that no rank before it reads."""
    last_step: int
    """The step after which results are finished: the last one in which a reader reads any row."""

    def transfers(self, step: int) -> Iterator[Transfer]:
        """What all its ranks send in a step: rows in the first one, results in the last one."""
        rounds = self.rounds[min(step, 1)]
        for reader, rows in self.fetched.items():
            if rows and step == 0:
                yield Transfer(rounds.fetched, "fetch", self.owner, reader, rows)
            if rows and step == self.last_step:
                yield Transfer(rounds.reduce, "reduce", reader, self.owner, rows)
        for fetcher, reader in product(self.fetched, self.needed):
            rows = intersect(self.fetched[fetcher], self.needed[reader])
            if rows and fetcher != reader and step == 0:
                yield Transfer(rounds.fetched, "pass_on", fetcher, reader, rows)
            if rows and fetcher != reader and step == self.last_step:
                yield Transfer(rounds.passed, "pass_back", reader, fetcher, rows)


class GatherRounds:
    """The rounds of all ranks. Rank r is on host r // host_size; size 1 is as without hosts."""

    def __init__(self, reads: Reads, host_size: int) -> None:
        self.reads, self.host_size = reads, host_size
        self.shards, self.layout, self.rows = reads.stay_shards, reads.stay_layout, reads.stay_rows
        self.num_hosts = -(-len(self.shards) // host_size)
        self._readers = ranks_by_shard(self.shards)
        self.bundles, self.deliveries = cache(self._bundles), cache(self._deliveries)
        self.deliveries_of = cache(self._deliveries_of)

    def stay(self, rank: int) -> Stay:
        """The buffer of the rows that a rank reads of the side that stays."""
        own, held = self.layout[rank], self.rows(rank)
        own_held = intersect(held, own)
        return Stay(size(own), size(held), locate(own_held, own), locate(own_held, held))

    def rounds(self, step: int, rank: int) -> Iterator[tuple[Ranges, Round]]:
        """(rows that are computed, messages) of every round of a step."""
        deliveries = [d for d in self.deliveries_of(rank) if step in (0, d.last_step)]
        if not deliveries:
            yield self.rows(rank), Round(())
            return
        computed = self._computed_rows(step, rank, deliveries)
        transfers = [
            transfer
            for delivery in deliveries
            for transfer in delivery.transfers(step)
            if rank in (transfer.sender, transfer.receiver)
        ]
        num_rounds = max([*computed, *(transfer.round_index for transfer in transfers)]) + 1
        for index in range(num_rounds):
            of_round = [transfer for transfer in transfers if transfer.round_index == index]
            names = {transfer.exchange for transfer in of_round}
            exchanges = {name: self._exchange(rank, name, of_round) for name in names}
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

    def _rounds(self, step: int, host: int, bundle: int | None = None) -> DeliveryRounds:
        num_bundles, on_hosts = len(self.bundles(host)), self.host_size > 1
        return delivery_rounds(step == 0, bundle, num_bundles, on_hosts)

    def _deliveries(self, owner: int, host: int) -> list[Delivery]:
        """Those of an owner's rows to the ranks of a host: one for all, or for each if near."""
        bundle, first_index = None, 0
        for i, first_indices in enumerate(self.bundles(host)):
            if owner in first_indices:
                bundle, first_index = i, first_indices[owner]
        ranks = range(len(self.shards))[host * self.host_size : (host + 1) * self.host_size]
        in_order = sorted(ranks, key=lambda rank: (rank - first_index) % self.host_size)
        own = self.layout[owner]
        read = {rank: intersect(self.rows(rank), own) for rank in in_order if rank != owner}
        needed = {rank: rows for rank, rows in read.items() if rows}
        groups = [needed] if needed else []
        if bundle is None:
            groups = [{rank: rows} for rank, rows in needed.items()]
        rounds = self._rounds(0, host, bundle), self._rounds(1, host, bundle)
        return [self._delivery(owner, rounds, group) for group in groups]

    def _delivery(
        self, owner: int, rounds: tuple[DeliveryRounds, DeliveryRounds], needed: dict[int, Ranges]
    ) -> Delivery:
        fetched: dict[int, Ranges] = {}
        fetched_before: Ranges = ()
        for rank, rows in needed.items():
            fetched[rank] = subtract(rows, fetched_before)
            fetched_before = union(fetched_before, rows)
        last_step = max(self._last_step(rank, self.layout[owner]) for rank in needed)
        return Delivery(owner, rounds, needed, fetched, last_step)

    def _last_step(self, rank: int, rows: Ranges) -> int:
        """The last step in which a rank reads any of the rows, which some step does."""
        rows_in_step = partial(self.reads.stay_rows_in_step, rank)
        steps = reversed(range(self.reads.num_steps))
        return next(step for step in steps if intersect(rows_in_step(step), rows))

    def _deliveries_of(self, rank: int) -> list[Delivery]:
        """Those of the rank's own rows to all hosts, then those of other owners' rows to it."""
        host, hosts = self._host(rank), sorted({*map(self._host, self._readers[rank])})
        pairs = [(rank, other) for other in hosts]
        pairs += [(owner, host) for owner in self.shards[rank] if owner != rank]
        deliveries = [delivery for pair in pairs for delivery in self.deliveries(*pair)]
        return [d for d in deliveries if rank == d.owner or rank in d.needed]

    def _computed_rows(self, step: int, rank: int, deliveries: list[Delivery]) -> dict[int, Ranges]:
        """Round index -> the rows that are computed in the round, given a step's deliveries."""
        computed: defaultdict[int, Ranges] = defaultdict(tuple)
        rest = self.rows(rank)
        for delivery in deliveries:
            if rank == delivery.owner:
                continue
            rounds = delivery.rounds[min(step, 1)]
            needed, fetched = delivery.needed[rank], delivery.fetched[rank]
            computed[rounds.fetched] = union(computed[rounds.fetched], fetched)
            computed[rounds.passed] = union(computed[rounds.passed], subtract(needed, fetched))
            rest = subtract(rest, needed)
        computed[self._rounds(step, self._host(rank)).rest] = rest
        return computed

    def _exchange(self, rank: int, name: str, transfers: list[Transfer]) -> Exchange:
        """An exchange of a round: all rows that go to a peer together, or come from it."""
        own, held = self.layout[rank], self.rows(rank)
        sent, received = defaultdict[int, Ranges](tuple), defaultdict[int, Ranges](tuple)
        for _, exchange, sender, receiver, rows in transfers:
            if exchange == name and sender == rank:
                sent[receiver] = union(sent[receiver], rows)
            elif exchange == name:
                received[sender] = union(received[sender], rows)
        return Exchange(
            parcels_of_peers(rank, sent.items(), own if name == "fetch" else held),
            parcels_of_peers(rank, received.items(), own if name == "reduce" else held),
        )
