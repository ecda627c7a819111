"""What one rank does, step by step: buffers, tiles and messages, derived from a schedule.

Pure: standard library only. One side stays (its rows are gathered once and computed on until the
end), the other walks. In the forward, queries stay and keys walk; in the backward either may
walk. Only rows that someone further down still needs are handed on; a partial gradient leaves
for home after the last step that adds to it, and what the home rank itself adds never travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from threading import Lock
from typing import TypeVar

from wf_backends.layout import Layout
from wf_backends.mask import Mask
from wf_backends.ranges import (
    Ranges,
    globalize,
    intersect,
    join,
    locate,
    size,
    subtract,
    union,
)
from wf_backends.rankplan import Gather, Parcel, Parcels, RankPlan, Round, Step, parcels
from wf_backends.rounds import Sharing
from wf_backends.schedule import Schedule, mirrored
from wf_backends.tiles import Documents, Tile, by_document, seen, tiles

T = TypeVar("T")
_DERIVING = Lock()  # ranks that are threads ask together: the first derives, the others read


@dataclass(frozen=True, slots=True)
class Problem:
    """A schedule laid over a sequence: all that the plans of all ranks follow from."""

    schedule: Schedule
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    queries_walk: bool = False
    half: int | None = None
    """0 or 1: only the first or the second half of every shard walks."""
    share: int | None = None
    """0 or 1: only those pairs of shards meet that meet later on the mirrored schedule; with 0
    also those that meet there at the same step."""


@lru_cache(maxsize=512)
def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """The plan of one rank; the same problem gives the same plan on every rank."""
    return _derive(problem).plan(rank)


def rows_walked(problem: Problem) -> int:
    """Rows that all walkers together carry from step to step."""
    return _derive(problem).rows_walked


def _derive(problem: Problem) -> _Derivation:
    with _DERIVING:
        return _derived(problem)


@lru_cache(maxsize=16)
def _derived(problem: Problem) -> _Derivation:
    return _Derivation(problem)


class _Derivation:
    """Positions (global ranges) of everything, worked out once for all ranks of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.mask, self.queries_walk = problem.mask, problem.queries_walk
        layouts = (problem.q_layout, problem.kv_layout)
        roles = problem.schedule.turned() if problem.queries_walk else problem.schedule
        self.roles = roles
        self.stay_home, self.walkers = layouts[::-1] if problem.queries_walk else layouts
        self.walk_home = _halves(self.walkers, problem.half)
        self.share, self.opposite = problem.share, _steps_of(mirrored(roles))
        self.num_ranks, self.num_steps = roles.num_ranks, roles.num_steps
        self.paths = roles.paths()
        self.origin = [[0] * self.num_ranks for _ in range(self.num_steps)]
        for origin, path in enumerate(self.paths):
            for step, rank in enumerate(path):
                self.origin[step][rank] = origin
        self._see()
        self._carry()
        self.sharing = Sharing(roles.q, self.stay_home, self.stay_rows, self.met)

    def _see(self) -> None:
        """The rows that some tile uses: of walkers wanted[origin][step], of what stays
        met[rank][step], and in any step stay_rows[rank]."""
        self.wanted: list[list[Ranges]] = [[()] * self.num_steps for _ in range(self.num_ranks)]
        self.met: list[list[Ranges]] = []
        self.stay_rows: list[Ranges] = []
        walkers = [self._documents(shards, self.walk_home) for shards in self.roles.kv]
        for rank in range(self.num_ranks):
            stay = self._documents(self.roles.q[rank], self.stay_home)
            used: list[Ranges] = []
            for step in range(self.num_steps):
                origin = self.origin[step][rank]
                if not self._meet(origin, rank, step):
                    used.append(())
                    continue
                sides = self._ordered(stay, walkers[origin])
                met, self.wanted[origin][step] = self._ordered(*seen(*sides, self.mask.band))
                used.append(met)
            self.met.append(used)
            self.stay_rows.append(join(piece for ranges in used for piece in ranges))

    def _meet(self, origin: int, rank: int, step: int) -> bool:
        """Whether the pair that meets in this step is one of this problem's share."""
        return self.share is None or self.opposite[origin][rank] >= step + self.share

    def _documents(self, shards: tuple[int, ...], home: Layout) -> Documents:
        """The rows of some shards, by document."""
        return by_document(join(piece for shard in shards for piece in home[shard]), self.mask)

    def _ordered(self, stay: T, walk: T) -> tuple[T, T]:
        """(queries, keys) from (stay, walk); and back, since it is its own inverse."""
        return (walk, stay) if self.queries_walk else (stay, walk)

    def _carry(self) -> None:
        """carried, moved and left, each [origin][step].

        carried: rows the walker brings to a step, all that it or a later step needs.
        moved: rows whose partial gradients go on to the next step. left: those that go home.
        """
        self.carried: list[list[Ranges]] = []
        self.moved: list[list[Ranges]] = []
        self.left: list[list[Ranges]] = []
        for origin, path in enumerate(self.paths):
            wanted = self.wanted[origin]
            carried: list[Ranges] = [()] * (self.num_steps + 1)
            for step in reversed(range(self.num_steps)):
                carried[step] = union(carried[step + 1], wanted[step])
            moved: list[Ranges] = []
            left: list[Ranges] = []
            here: Ranges = ()
            for step, rank in enumerate(path):
                here = union(here, wanted[step])
                parting = here  # what the rank owns itself does not go on
                if rank in self.roles.kv[origin]:
                    parting = subtract(here, self.walk_home[rank])
                onward = intersect(parting, carried[step + 1])
                moved.append(onward)
                left.append(subtract(here, onward))
                here = onward
            self.carried.append(carried)
            self.moved.append(moved)
            self.left.append(left)

    @cached_property
    def rows_walked(self) -> int:
        """See `rows_walked`."""
        return sum(size(rows) for carried in self.carried for rows in carried[1:])

    def plan(self, rank: int) -> RankPlan:
        stay = _Touched()
        steps = tuple(self._step(step, rank, stay) for step in range(self.num_steps))
        return RankPlan(
            rank=rank,
            queries_walk=self.queries_walk,
            stay=self.sharing.stay(rank),
            walk=self._gather(rank),
            steps=steps,
            blank=subtract(((0, size(self.stay_rows[rank])),), stay.written),
            stay_rows=self.stay_rows[rank],
            walk_rows=self.carried[rank][0],
            part=locate(self.walk_home[rank], self.walkers[rank]),
        )

    def _gather(self, rank: int) -> Gather:
        """How the walkers that a rank first holds get there from their homes."""
        shards, home = self.roles.kv, self.walk_home
        rows = [carried[0] for carried in self.carried]
        give = (
            (other, intersect(rows[other], home[rank]))
            for other in range(self.num_ranks)
            if rank in shards[other]
        )
        take = ((owner, intersect(rows[rank], home[owner])) for owner in sorted(shards[rank]))
        return Gather(
            shard_rows=size(home[rank]),
            num_rows=size(rows[rank]),
            give=_parcels(rank, give, home[rank]),
            take=_parcels(rank, take, rows[rank]),
        )

    def _rounds(
        self, step: int, rank: int, held: Ranges, stay: _Touched, walk: _Touched
    ) -> Iterator[Round]:
        """The rounds of a step, each tile told whether it is the first on its rows and keys."""
        meet = self._meet(self.origin[step][rank], rank, step)
        for rows, fetch, home in self.sharing.rounds(step, rank):
            buffers = self._ordered(self.stay_rows[rank], held)
            found = tiles(*self._ordered(rows, held), self.mask, buffers) if meet else ()
            marked = tuple(self._marked(tile, stay, walk) for tile in found)
            yield Round(marked, fetch, home)

    def _marked(self, tile: Tile, stay: _Touched, walk: _Touched) -> Tile:
        rows, keys = self._ordered(stay, walk)
        return replace(
            tile, first_on_rows=rows.first(tile.rows), first_on_keys=keys.first(tile.keys)
        )

    def _step(self, step: int, rank: int, stay: _Touched) -> Step:
        origin = self.origin[step][rank]
        held = self.carried[origin][step]
        last = step == self.num_steps - 1
        after = None if last else self.paths[origin][step + 1]
        comes = None if last else self.origin[step + 1][rank]
        came = None if step == 0 else self.paths[origin][step - 1]
        coming = () if comes is None else self.carried[comes][step + 1]
        past = () if step == 0 else self.moved[origin][step - 1]
        walk = _Touched()
        rounds = tuple(self._rounds(step, rank, held, stay, walk))
        return Step(
            num_rows=size(held),
            rounds=rounds,
            blank=subtract(((0, size(held)),), walk.written),
            pass_out=_parcel(after, self.carried[origin][step + 1], held),
            pass_in=_parcel(self.paths[comes][step] if comes is not None else None, coming, coming),
            partial_in=_parcel(came, past, held),
            partial_out=_parcel(after, self.moved[origin][step], held),
            home_out=_parcels(rank, self._leaving(origin, step), held),
            home_in=_parcels(rank, self._returning(step, rank), self.walk_home[rank]),
        )

    def _leaving(self, origin: int, step: int) -> Iterator[tuple[int, Ranges]]:
        for owner in sorted(self.roles.kv[origin]):
            yield owner, intersect(self.left[origin][step], self.walk_home[owner])

    def _returning(self, step: int, rank: int) -> Iterator[tuple[int, Ranges]]:
        for holder in range(self.num_ranks):
            origin = self.origin[step][holder]
            if rank in self.roles.kv[origin]:
                yield holder, intersect(self.left[origin][step], self.walk_home[rank])


class _Touched:
    """Rows of a buffer that some tile has overwritten, and rows that some tile has added to."""

    def __init__(self) -> None:
        self.written: Ranges = ()
        self.added: Ranges = ()

    def first(self, rows: Ranges) -> bool:
        """Whether a tile is the first on all of these rows, and so may overwrite them."""
        first = not intersect(rows, self.added)
        self.added = join((*self.added, *rows))
        if first:
            self.written = join((*self.written, *rows))
        return first


def _steps_of(roles: Schedule) -> list[dict[int, int]]:
    """origin -> rank -> the step in which they meet."""
    return [{rank: step for step, rank in enumerate(path)} for path in roles.paths()]


def _halves(layout: Layout, half: int | None) -> Layout:
    """The first or the second half of the rows of every shard; None = all of them."""
    if half is None:
        return layout

    def cut(shard: Ranges) -> Ranges:
        rows = size(shard)
        middle = (rows + 1) // 2
        return globalize(((middle, rows),) if half else ((0, middle),), shard)

    return tuple(map(cut, layout))


def _parcel(peer: int | None, rows: Ranges, held: Ranges) -> Parcel | None:
    return None if peer is None or not rows else Parcel(peer, locate(rows, held))


def _parcels(rank: int, found: Iterator[tuple[int, Ranges]], held: Ranges) -> Parcels:
    """All parcels of a rank; what it keeps is one."""
    several = (
        (_parcel(peer, rows, held),) if peer == rank else parcels(peer, rows, held)
        for peer, rows in found
    )
    return tuple(parcel for ones in several for parcel in ones if parcel)
