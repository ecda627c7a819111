"""Where the rows of a walker are at every step, and how they get there and home again.

Pure: standard library only. A row is only where it is read. If the next rank on the way reads it
too, it is handed on, and its partial result with it. If not, the partial result goes home, and the
owner sends the row again, straight to the next rank that reads it: as many messages as readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from wf_backends.layout import Layout
from wf_backends.ranges import Ranges, intersect, locate, size, subtract, union
from wf_backends.rankplan import Gather, Parcel, Parcels, Round, Step, handover, parcels
from wf_backends.schedule import Schedule

Sent = tuple[int, Ranges]  # the rank at the far end, and rows (positions)


@dataclass(frozen=True, slots=True)
class Journey:
    """Rows (positions) of one walker, each [step]."""

    held: tuple[Ranges, ...]
    """Those that it brings."""
    handed: tuple[Ranges, ...]
    """Of them, those that the rank of the step before hands on; owners send the others."""
    moved: tuple[Ranges, ...]
    """Those whose partial results go on to the next step."""
    left: tuple[Ranges, ...]
    """Those whose partial results go home."""


def journey(
    wanted: Sequence[Ranges], owned: Sequence[Ranges], whole: bool = False, through: bool = False
) -> Journey:
    """How a walker visits its readers.

    Args:
        wanted: rows that the step's rank reads. owned: rows of the walker that are the rank's own.
        whole: bring to the first step all that any step reads.
        through: hand rows on by way of ranks that do not read them, until nobody further down
            does: every link of a step then carries as much as any other.
    """
    later = still_read(wanted)
    held = later if through else [later[0] if whole else wanted[0], *wanted[1:]]
    handed: list[Ranges] = [()]
    moved: list[Ranges] = []
    left: list[Ranges] = []
    here: Ranges = ()
    for step, rows in enumerate(wanted):
        here, onward = union(here, rows), (*held, ())[step + 1]
        going = intersect(subtract(here, owned[step]), onward)
        moved.append(going)
        left.append(subtract(here, going))
        here = going
        if step:  # owners send their own rows, and keep those that come to them
            near = union(owned[step - 1], owned[step])
            handed.append(subtract(intersect(held[step - 1], held[step]), near))
    return Journey(tuple(held), tuple(handed), tuple(moved), tuple(left))


def still_read(wanted: Sequence[Ranges]) -> list[Ranges]:
    """The rows that are read in a step or further down, [step]."""
    return list(accumulate(reversed(wanted), union))[::-1]


class Journeys:
    """Those of all walkers of a schedule, and the messages that follow from them.

    Args:
        roles: its field `kv` names the shards that walk. home: the walkers' rows that each rank
            owns.
        wanted: [origin][step], the rows of a walker that the step's rank reads.
        whole, through: see `journey`; `whole` only where walkers are gathered.
    """

    def __init__(
        self,
        roles: Schedule,
        home: Layout,
        wanted: list[list[Ranges]],
        whole: bool = False,
        through: bool = False,
    ) -> None:
        self.kv, self.home, self.num_ranks = roles.kv, home, roles.num_ranks
        self.paths, self.origin = roles.paths(), roles.origins()
        whole = whole and roles.gathers()[1]
        self.ones = [
            journey(rows, [self._owned(origin, rank) for rank in path], whole, through)
            for origin, (rows, path) in enumerate(zip(wanted, self.paths, strict=True))
        ]
        self.given: defaultdict[tuple[int, int], list[Sent]] = defaultdict(list)
        self.taken: defaultdict[tuple[int, int], list[Sent]] = defaultdict(list)
        self.reads = [self._give(rank) for rank in range(self.num_ranks)]

    def held(self, step: int, rank: int) -> Ranges:
        """The rows of walkers that a rank holds in a step."""
        return self.ones[self.origin[step][rank]].held[step]

    def gather(self, rank: int) -> Gather:
        """How the walkers that a rank first holds get there from their homes."""
        rows, home = self.held(0, rank), self.home[rank]
        others = (other for other in range(self.num_ranks) if rank in self.kv[other])
        give = ((other, intersect(self.held(0, other), home)) for other in others)
        take = ((owner, intersect(rows, self.home[owner])) for owner in sorted(self.kv[rank]))
        return Gather(size(home), size(rows), _all(rank, give, home), _all(rank, take, rows))

    def step(self, step: int, rank: int, rounds: tuple[Round, ...], blank: Ranges) -> Step:
        """A step of a rank's plan, with all its messages about walkers."""
        origin, home, held = self.origin[step][rank], self.home[rank], self.held(step, rank)
        one, path = self.ones[origin], self.paths[origin]
        hand, after, came, past = (), -1, -1, ()
        if step + 1 < len(path):
            after = path[step + 1]
            hand = handover(after, one.handed[step + 1], held, one.held[step + 1])
        if step:
            came, past = path[step - 1], one.moved[step - 1]
        take, get, more = self._arriving(step, rank)
        return Step(
            num_rows=size(held),
            rounds=rounds,
            blank=blank,
            hand=hand,
            take=take,
            give=_all(rank, self.given[step, rank], home),
            get=get,
            more=more,
            partial_in=_parcel(came, past, held),
            partial_out=_parcel(after, one.moved[step], held),
            home_out=_all(rank, self._leaving(step, rank), held),
            home_in=_all(rank, self._returning(step, rank), home),
        )

    def _owned(self, origin: int, rank: int) -> Ranges:
        """The rows of a walker that are a rank's own."""
        return self.home[rank] if rank in self.kv[origin] else ()

    def _give(self, rank: int) -> list[int]:
        """The later steps in which a rank reads anything; what owners send for them is noted.

        They send it during the step before in which the rank has something to compute.
        """
        steps = range(1, len(self.origin))
        reads = [step for step in steps if self.held(step, rank)]
        for before, step in zip((0, *reads), reads, strict=False):
            origin = self.origin[step][rank]
            one = self.ones[origin]
            rows = subtract(one.held[step], one.handed[step])
            for owner in self.kv[origin] if rows else ():
                if own := intersect(rows, self.home[owner]):
                    self.given[before, owner].append((rank, own))
                    self.taken[before, rank].append((owner, own))
        return reads

    def _arriving(self, step: int, rank: int) -> tuple[Parcels, Parcels, int]:
        """(take, get) during a step, and the rows of the buffer that they fill."""
        ahead = next((at for at in self.reads[rank] if at > step), None)
        if ahead is None:
            return (), (), 0
        origin = self.origin[ahead][rank]
        one, rows = self.ones[origin], self.held(ahead, rank)
        take: Parcels = ()
        if ahead == step + 1:
            take = handover(self.paths[origin][step], one.handed[ahead], rows, one.held[step])
        return take, _all(rank, self.taken[step, rank], rows), size(rows)

    def _leaving(self, step: int, rank: int) -> Iterator[Sent]:
        """The partial results that a rank sends home after a step."""
        origin = self.origin[step][rank]
        for owner in sorted(self.kv[origin]):
            yield owner, intersect(self.ones[origin].left[step], self.home[owner])

    def _returning(self, step: int, rank: int) -> Iterator[Sent]:
        """Those that come home to a rank."""
        for holder in range(self.num_ranks):
            origin = self.origin[step][holder]
            if rank in self.kv[origin]:
                yield holder, intersect(self.ones[origin].left[step], self.home[rank])


def _parcel(peer: int, rows: Ranges, held: Ranges) -> Parcel | None:
    return Parcel(peer, locate(rows, held)) if rows else None


def _all(rank: int, found: Iterable[Sent], held: Ranges) -> Parcels:
    """All parcels of a rank; what it keeps is one."""
    several = (
        (_parcel(peer, rows, held),) if peer == rank else parcels(peer, rows, held)
        for peer, rows in found
    )
    return tuple(parcel for ones in several for parcel in ones if parcel)
