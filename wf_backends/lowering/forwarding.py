"""Where the rows of a walker are at every step, and who sends them there and back to their owners.

Pure: standard library only. A row is only where it is read. If the next rank of the hop reads it
too, it is forwarded, and its partial result with it. If not, the partial result is sent to the
owner, and the owner sends the row again, to the next rank that reads it: one message a reader.
Everything is found when it is asked for, so that one rank among thousands looks at its own part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate

from wf_backends.lowering.program import (
    Gather,
    Parcel,
    Parcels,
    Round,
    Step,
    forward_parcels,
    parcels,
)
from wf_backends.schedule import (
    Layout,
    Ranges,
    Schedule,
    carriers,
    intersect,
    locate,
    size,
    subtract,
    union,
)

Sent = tuple[int, Ranges]  # the rank at the far end, and rows (positions)
Rows = Callable[[int], Ranges]  # step -> rows (positions)


class WalkerRows:
    """Rows (positions) of one walker, by step.

    Args:
        wanted: rows that the step's rank reads. owned: rows of the walker that are the rank's own.
        whole: bring to the first step all that any step reads.
    """

    def __init__(self, wanted: Rows, owned: Rows, num_steps: int, whole: bool = False) -> None:
        self.wanted, self.owned, self.num_steps, self.whole = wanted, owned, num_steps, whole
        self.needed = cache(self._needed)
        """The rows that are held in a step."""
        self.forwarded = cache(self._forwarded)
        """Of them, those that the rank of the step before forwards; owners send the others."""
        self.grad_forwarded = cache(self._grad_forwarded)
        """The rows whose partial results are forwarded to the next step."""

    def grad_to_owner(self, step: int) -> Ranges:
        """The rows whose partial results are sent to their owners after a step."""
        return subtract(self._summed(step), self.grad_forwarded(step))

    def from_owner(self, step: int) -> Ranges:
        """The rows that owners send for a step, since the rank before does not forward them."""
        return subtract(self.needed(step), self.forwarded(step))

    def _needed(self, step: int) -> Ranges:
        if step == 0 and self.whole:
            return needed_later([self.wanted(at) for at in range(self.num_steps)])[0]
        return self.wanted(step)

    def _forwarded(self, step: int) -> Ranges:
        if not step:
            return ()
        near = union(self.owned(step - 1), self.owned(step))
        # owners send their own rows, and keep those that come to them
        return subtract(intersect(self.needed(step - 1), self.needed(step)), near)

    def _summed(self, step: int) -> Ranges:
        """The rows with partial results after a step: every row that is held is read."""
        return self.wanted(step)

    def _grad_forwarded(self, step: int) -> Ranges:
        return self._onward(self._summed(step), step)

    def _onward(self, rows: Ranges, step: int) -> Ranges:
        """Of these rows, those that the next step holds."""
        held = self.needed(step + 1) if step + 1 < self.num_steps else ()
        return intersect(subtract(rows, self.owned(step)), held)


class RelayedRows(WalkerRows):
    """Rows that are forwarded by way of ranks that do not read them, until nobody further down
    does: every link of a step then carries as much as any other."""

    def __init__(self, wanted: Rows, owned: Rows, num_steps: int, whole: bool = False) -> None:
        super().__init__(wanted, owned, num_steps, whole)
        self._later = needed_later([wanted(step) for step in range(num_steps)])
        self._sums: list[Ranges] = []
        moved: Ranges = ()
        for step in range(num_steps):
            self._sums.append(union(moved, wanted(step)))
            moved = self._onward(self._sums[-1], step)

    def _needed(self, step: int) -> Ranges:
        return self._later[step]

    def _summed(self, step: int) -> Ranges:
        return self._sums[step]


def needed_later(wanted: Sequence[Ranges]) -> list[Ranges]:
    """The rows that are read in a step or further down, [step]."""
    return list(accumulate(reversed(wanted), union))[::-1]


class Forwarding:
    """The rows of all walkers of a schedule, and the messages that follow from them.

    Args:
        roles: its field `kv` names the shards that walk. home: the walkers' rows that each rank
            owns.
        wanted: (step, origin) -> the rows of a walker that the step's rank reads.
        whole: see `WalkerRows`; only where walkers are gathered. through: `RelayedRows`.
    """

    def __init__(
        self,
        roles: Schedule,
        home: Layout,
        wanted: Callable[[int, int], Ranges],
        whole: bool = False,
        through: bool = False,
    ) -> None:
        self.roles, self.kv, self.home = roles, roles.kv, home
        self.num_steps = roles.num_steps
        self.carriers = carriers(roles.kv)
        self._wanted, self._whole = wanted, whole and roles.gathers()[1]
        self._kind = RelayedRows if through else WalkerRows
        self.one = cache(self._one)
        """The rows of the walker that a rank first holds."""
        self.reads = cache(self._reads)
        """The later steps in which a rank reads anything."""
        self._given, self._taken = cache(self._gifts), cache(self._takings)

    def held(self, step: int, rank: int) -> Ranges:
        """The rows of walkers that a rank holds in a step."""
        return self.one(self.roles.origin(step, rank)).needed(step)

    def gather(self, rank: int) -> Gather:
        """The messages by which a rank's first walkers come from their owners."""
        rows, home = self.held(0, rank), self.home[rank]
        give = ((other, intersect(self.held(0, other), home)) for other in self.carriers[rank])
        take = ((owner, intersect(rows, self.home[owner])) for owner in sorted(self.kv[rank]))
        return Gather(size(home), size(rows), _all(rank, give, home), _all(rank, take, rows))

    def step(self, step: int, rank: int, rounds: tuple[Round, ...], blank: Ranges) -> Step:
        """A step of a rank's program, with all messages of walkers."""
        origin, home, held = self.roles.origin(step, rank), self.home[rank], self.held(step, rank)
        one = self.one(origin)
        onward, after, came, past = (), -1, -1, ()
        if step + 1 < self.num_steps:
            after = self.roles.place(step + 1, origin)
            onward = forward_parcels(after, one.forwarded(step + 1), held, one.needed(step + 1))
        if step:
            came, past = self.roles.place(step - 1, origin), one.grad_forwarded(step - 1)
        take, get, more = self._arriving(step, rank)
        return Step(
            num_rows=size(held),
            rounds=rounds,
            blank=blank,
            forwarded=onward,
            take=take,
            give=_all(rank, self._given(rank).get(step, ()), home),
            get=get,
            more=more,
            partial_in=_parcel(came, past, held),
            partial_out=_parcel(after, one.grad_forwarded(step), held),
            home_out=_all(rank, self._leaving(step, rank), held),
            home_in=_all(rank, self._returning(step, rank), home),
        )

    def _one(self, origin: int) -> WalkerRows:
        def wanted(step: int) -> Ranges:
            return self._wanted(step, origin)

        return self._kind(wanted, partial(self._owned, origin), self.num_steps, self._whole)

    def _owned(self, origin: int, step: int) -> Ranges:
        """The rows of a walker that are the step's rank's own."""
        rank = self.roles.place(step, origin)
        return self.home[rank] if rank in self.kv[origin] else ()

    def _reads(self, rank: int) -> list[int]:
        return [step for step in range(1, self.num_steps) if self.held(step, rank)]

    def _before(self, step: int, rank: int) -> int:
        """The step in which owners send what a rank reads in `step`: the one before in which it
        has something to compute."""
        earlier = range(step - 1, 0, -1)
        return next((at for at in earlier if self.held(at, rank)), 0)

    def _gifts(self, owner: int) -> defaultdict[int, list[Sent]]:
        """What an owner sends later readers of its rows, by the step in which it does."""
        found: defaultdict[int, list[Sent]] = defaultdict(list)
        for origin in self.carriers[owner]:
            for step in range(1, self.num_steps):
                if own := intersect(self.one(origin).from_owner(step), self.home[owner]):
                    reader = self.roles.place(step, origin)
                    found[self._before(step, reader)].append((reader, own))
        return found

    def _takings(self, reader: int) -> defaultdict[int, list[Sent]]:
        """What owners send a reader, by the step in which they do."""
        found: defaultdict[int, list[Sent]] = defaultdict(list)
        reads = self.reads(reader)
        for before, step in zip((0, *reads), reads, strict=False):
            origin = self.roles.origin(step, reader)
            rows = self.one(origin).from_owner(step)
            for owner in self.kv[origin] if rows else ():
                if own := intersect(rows, self.home[owner]):
                    found[before].append((owner, own))
        return found

    def _arriving(self, step: int, rank: int) -> tuple[Parcels, Parcels, int]:
        """(take, get) during a step, and the rows of the buffer that they fill."""
        reads = self.reads(rank)
        at = bisect_right(reads, step)
        if at == len(reads):
            return (), (), 0
        ahead = reads[at]
        origin = self.roles.origin(ahead, rank)
        one, rows = self.one(origin), self.held(ahead, rank)
        take: Parcels = ()
        if ahead == step + 1:
            take = forward_parcels(
                self.roles.place(step, origin), one.forwarded(ahead), rows, one.needed(step)
            )
        return take, _all(rank, self._taken(rank).get(step, ()), rows), size(rows)

    def _leaving(self, step: int, rank: int) -> Iterator[Sent]:
        """The partial results that a rank sends to their owners after a step."""
        origin = self.roles.origin(step, rank)
        rows = self.one(origin).grad_to_owner(step)
        for owner in sorted(self.kv[origin]):
            yield owner, intersect(rows, self.home[owner])

    def _returning(self, step: int, rank: int) -> Iterator[Sent]:
        """The partial results that other ranks send to this owner."""
        holders = sorted((self.roles.place(step, one), one) for one in self.carriers[rank])
        for holder, origin in holders:
            yield holder, intersect(self.one(origin).grad_to_owner(step), self.home[rank])


def _parcel(peer: int, rows: Ranges, held: Ranges) -> Parcel | None:
    return Parcel(peer, locate(rows, held)) if rows else None


def _all(rank: int, found: Iterable[Sent], held: Ranges) -> Parcels:
    """All parcels of a rank; the rows that it keeps are one parcel."""
    several = (
        (_parcel(peer, rows, held),) if peer == rank else parcels(peer, rows, held)
        for peer, rows in found
    )
    return tuple(parcel for ones in several for parcel in ones if parcel)
