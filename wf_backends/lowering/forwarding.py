"""Where the rows of a walker are at every step, and who sends them there and back to their owners.

Pure: standard library only. A row is only where it is read. If the next rank of the hop reads it
too, it is forwarded, and its partial result with it. If not, the partial result is sent to the
owner, and the owner sends the row again, to the next rank that reads it: one message a reader.
Everything is found when it is asked for, so that one rank among thousands looks at its own part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, chain

from wf_backends.lowering.problem import Reads
from wf_backends.lowering.program import (
    Gather,
    Parcels,
    Round,
    Step,
    hop_parcels,
    parcels,
)
from wf_backends.schedule import Ranges, carriers, intersect, size, subtract, union

Sent = tuple[int, Ranges]  # the rank at the far end, and rows (positions)
Rows = Callable[[int], Ranges]  # step -> rows (positions)


class WalkerRows:
    """Rows (positions) of one walker, by step.

    Args:
        wanted: rows that the step's rank reads. owned: rows of the walker that are the rank's own.
        whole: bring to the first step all that any step reads.
    """

    def __init__(self, wanted: Rows, owned: Rows, num_steps: int, whole: bool = False) -> None:
        self.wanted, self.owned, self.num_steps, self.whole = cache(wanted), owned, num_steps, whole
        self.forwarded = cache(self._forwarded)
        """Of the rows that are held in a step, those that the rank of the step before forwards."""
        self.grad_forwarded = cache(self._grad_forwarded)
        """The rows whose partial results are forwarded to the next step."""

    def needed(self, step: int) -> Ranges:
        """The rows that are held in a step."""
        return self._later[0] if self.whole and step == 0 else self.wanted(step)

    def from_owner(self, step: int) -> Ranges:
        """The rows that owners send for a step, since the rank before does not forward them."""
        return subtract(self.needed(step), self.forwarded(step))

    def grad_to_owner(self, step: int) -> Ranges:
        """The rows whose partial results are sent to their owners after a step."""
        return subtract(self._summed(step), self.grad_forwarded(step))

    @cached_property
    def _later(self) -> list[Ranges]:
        return needed_later([self.wanted(step) for step in range(self.num_steps)])

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

    def needed(self, step: int) -> Ranges:
        """The rows that are held in a step: all that are still read."""
        return self._later[step]

    def _summed(self, step: int) -> Ranges:
        return self._sums[step]

    @cached_property
    def _sums(self) -> list[Ranges]:
        found, moved = list[Ranges](), ()
        for step in range(self.num_steps):
            found.append(union(moved, self.wanted(step)))
            moved = self._onward(found[-1], step)
        return found


def needed_later(wanted: Sequence[Ranges]) -> list[Ranges]:
    """The rows that are read in a step or further down, [step]."""
    return list(accumulate(reversed(wanted), union))[::-1]


class Forwarding:
    """The rows of all walkers of a problem, and the messages that follow from them.

    Args:
        kept: whether walkers, where they are gathered, come with all rows that any step reads.
    """

    def __init__(self, reads: Reads, kept: bool) -> None:
        self.reads, self.roles, self.home = reads, reads.roles, reads.walk_home
        self.num_steps, self.carriers = reads.num_steps, carriers(reads.walk_shards)
        self._whole = kept and self.roles.gathers()[1]
        through = self.roles.has_laps and reads.mask.is_dense
        self._kind = RelayedRows if through else WalkerRows
        self.one = cache(self._one)
        """The rows of the walker that a rank first holds."""
        self.reading = cache(self._reading)
        """The later steps in which a rank reads anything."""
        self._given = cache(self._gifts)

    def held(self, step: int, rank: int) -> Ranges:
        """The rows of walkers that a rank holds in a step."""
        return self.one(self.roles.origin(step, rank)).needed(step)

    def gather(self, rank: int) -> Gather:
        """The messages by which a rank's first walkers come from their owners."""
        rows, home = self.held(0, rank), self.home[rank]
        give = ((other, intersect(self.held(0, other), home)) for other in self.carriers[rank])
        take = self._by_owner(rank, rows)
        return Gather(size(home), size(rows), _all(rank, give, home), _all(rank, take, rows))

    def step(self, step: int, rank: int, rounds: tuple[Round, ...], blank: Ranges) -> Step:
        """A step of a rank's program, with all messages of walkers."""
        origin, home = self.roles.origin(step, rank), self.home[rank]
        one = self.one(origin)
        held = one.needed(step)
        onward, after, came, past = (), -1, -1, ()
        if step + 1 < self.num_steps:
            after = self.roles.place(step + 1, origin)
            onward = hop_parcels(after, one.forwarded(step + 1), held, one.needed(step + 1))
        if step:
            came, past = self.roles.place(step - 1, origin), one.grad_forwarded(step - 1)
        take, get, more = self._arriving(step, rank)
        return Step(
            num_rows=size(held),
            rounds=rounds,
            blank=blank,
            hop_out=onward,
            hop_in=take,
            owner_out=_all(rank, self._given(rank).get(step, ()), home),
            owner_in=get,
            next_num_rows=more,
            partial_in=parcels(came, past, held, whole=True),
            partial_out=parcels(after, one.grad_forwarded(step), held, whole=True),
            home_out=_all(rank, self._by_owner(origin, one.grad_to_owner(step)), held),
            home_in=_all(rank, self._returning(step, rank), home),
        )

    def _one(self, origin: int) -> WalkerRows:
        wanted, owned = partial(self.reads.walk, origin), partial(self._owned, origin)
        return self._kind(wanted, owned, self.num_steps, self._whole)

    def _owned(self, origin: int, step: int) -> Ranges:
        """The rows of a walker that are the step's rank's own."""
        rank = self.roles.place(step, origin)
        return self.home[rank] if rank in self.reads.walk_shards[origin] else ()

    def _reading(self, rank: int) -> list[int]:
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

    def _arriving(self, step: int, rank: int) -> tuple[Parcels, Parcels, int]:
        """(take, get) during a step, and the rows of the buffer that they fill."""
        reading = self.reading(rank)
        at = bisect_right(reading, step)
        if at == len(reading):
            return (), (), 0
        ahead = reading[at]
        origin = self.roles.origin(ahead, rank)
        one, rows = self.one(origin), self.held(ahead, rank)
        take: Parcels = ()
        if ahead == step + 1:
            take = hop_parcels(
                self.roles.place(step, origin), one.forwarded(ahead), rows, one.needed(step)
            )
        asked = step == (reading[at - 1] if at else 0)  # in the step before in which it computes
        missing = one.from_owner(ahead) if asked else ()
        return take, _all(rank, self._by_owner(origin, missing), rows), size(rows)

    def _by_owner(self, origin: int, rows: Ranges) -> list[Sent]:
        """Rows of a walker, by the rank that owns them."""
        owners = self.reads.walk_shards[origin]
        return [(owner, intersect(rows, self.home[owner])) for owner in owners]

    def _returning(self, step: int, rank: int) -> list[Sent]:
        """The partial results that other ranks send to this owner after a step."""
        return sorted(
            (
                self.roles.place(step, one),
                intersect(self.one(one).grad_to_owner(step), self.home[rank]),
            )
            for one in self.carriers[rank]
        )


def _all(rank: int, found: Iterable[Sent], held: Ranges) -> Parcels:
    """All parcels of a rank; the rows that it keeps are one parcel."""
    several = (parcels(peer, rows, held, whole=peer == rank) for peer, rows in found)
    return tuple(chain.from_iterable(several))
