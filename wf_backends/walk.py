"""What one rank does, step by step: buffers, tiles and messages, derived from a schedule.

Pure: standard library only. One side stays (its rows are gathered once and computed on until the
end), the other walks. In the forward, queries stay and keys walk; in the backward either may
walk. Only rows that someone further down still needs are handed on; a partial gradient leaves
for home after the last step that adds to it, and what the home rank itself adds never travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from wf_backends.layout import Layout
from wf_backends.mask import Mask
from wf_backends.ranges import Ranges, intersect, join, locate, size, subtract
from wf_backends.schedule import Schedule, mirrored
from wf_backends.tiles import Tile, seen_keys, seen_rows, tiles


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows that one message carries: slices of this rank's buffer, and who is at the far end."""

    peer: int
    rows: Ranges

    @property
    def num_rows(self) -> int:
        return size(self.rows)


Parcels = tuple[Parcel, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of shards brought together in one buffer; read backwards, the way home.

    `give` slices this rank's own shard of `shard_rows` rows, `take` slices the buffer of
    `num_rows` rows. A parcel to oneself is no message.
    """

    shard_rows: int
    num_rows: int
    give: Parcels
    take: Parcels


@dataclass(frozen=True, slots=True)
class Step:
    """One step: compute `tiles` on the held walkers while the next ones arrive.

    `blank` are the held rows whose partial results start from nothing; a tile overwrites the rest.
    Slices of `pass_out`, `partial_*` and `home_out` are in this step's buffer of held rows,
    those of `pass_in` in the next step's, those of `home_in` in this rank's own shard.
    """

    num_rows: int
    tiles: tuple[Tile, ...]
    blank: Ranges
    pass_out: Parcel | None
    pass_in: Parcel | None
    partial_in: Parcel | None
    partial_out: Parcel | None
    home_out: Parcels
    home_in: Parcels


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does in one pass."""

    rank: int
    queries_walk: bool
    stay: Gather
    walk: Gather
    steps: tuple[Step, ...]
    blank: Ranges
    """As in Step, of the side that stays."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A schedule laid over a sequence: all that the plans of all ranks follow from."""

    schedule: Schedule
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    queries_walk: bool = False


def turning_well(problem: Problem) -> Problem:
    """The problem with its schedule mirrored where fewer rows then have to walk.

    Keys of a sliding window are needed by later tokens only; walking there, they can stop early.
    """
    other = replace(problem, schedule=mirrored(problem.schedule))
    return min(problem, other, key=lambda one: _derive(one).rows_walked())


@lru_cache(maxsize=512)
def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """The plan of one rank; the same problem gives the same plan on every rank."""
    return _derive(problem).plan(rank)


@lru_cache(maxsize=64)
def _derive(problem: Problem) -> _Derivation:
    return _Derivation(problem)


class _Derivation:
    """Positions (global ranges) of everything, worked out once for all ranks of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.mask, self.queries_walk = problem.mask, problem.queries_walk
        layouts = (problem.q_layout, problem.kv_layout)
        roles = problem.schedule.turned() if problem.queries_walk else problem.schedule
        self.roles = roles
        self.stay_home, self.walk_home = layouts[::-1] if problem.queries_walk else layouts
        self.num_ranks, self.num_steps = roles.num_ranks, roles.num_steps
        self.paths = roles.paths()
        self.origin = [[0] * self.num_ranks for _ in range(self.num_steps)]
        for origin, path in enumerate(self.paths):
            for step, rank in enumerate(path):
                self.origin[step][rank] = origin
        self._see()
        self._carry()

    def _see(self) -> None:
        """stay_rows[rank], and wanted[origin][step]: the walkers' rows that some tile uses."""
        self.wanted: list[list[Ranges]] = [[()] * self.num_steps for _ in range(self.num_ranks)]
        self.stay_rows: list[Ranges] = [()] * self.num_ranks
        for rank in range(self.num_ranks):
            whole = _rows_of(self.roles.q[rank], self.stay_home)
            used: list[Ranges] = []
            for step in range(self.num_steps):
                origin = self.origin[step][rank]
                met, wanted = self._meet(whole, _rows_of(self.roles.kv[origin], self.walk_home))
                self.wanted[origin][step] = wanted
                used.append(met)
            self.stay_rows[rank] = join(piece for ranges in used for piece in ranges)

    def _meet(self, stay: Ranges, walk: Ranges) -> tuple[Ranges, Ranges]:
        """The rows of either side that the tiles between them use."""
        q, kv = self._ordered(stay, walk)
        found = tiles(q, kv, self.mask)
        return self._ordered(seen_rows(found, q), seen_keys(found, kv))

    def _ordered(self, stay: Ranges, walk: Ranges) -> tuple[Ranges, Ranges]:
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
                carried[step] = join((*carried[step + 1], *wanted[step]))
            moved: list[Ranges] = []
            left: list[Ranges] = []
            here: Ranges = ()
            for step, rank in enumerate(path):
                here = join((*here, *wanted[step]))
                onward = intersect(subtract(here, self.walk_home[rank]), carried[step + 1])
                moved.append(onward)
                left.append(subtract(here, onward))
                here = onward
            self.carried.append(carried)
            self.moved.append(moved)
            self.left.append(left)

    def rows_walked(self) -> int:
        """Rows that all walkers together carry from step to step."""
        return sum(size(rows) for carried in self.carried for rows in carried[1:])

    def plan(self, rank: int) -> RankPlan:
        steps: list[Step] = []
        written: Ranges = ()
        added: Ranges = ()
        for step in range(self.num_steps):
            found = self._step(step, rank)
            marked, written, added = self._mark(found.tiles, written, added, stay=True)
            steps.append(replace(found, tiles=marked))
        return RankPlan(
            rank=rank,
            queries_walk=self.queries_walk,
            stay=self._gather(rank, self.roles.q, self.stay_home, self.stay_rows),
            walk=self._gather(rank, self.roles.kv, self.walk_home, [c[0] for c in self.carried]),
            steps=tuple(steps),
            blank=subtract(((0, size(self.stay_rows[rank])),), written),
        )

    def _mark(
        self, found: tuple[Tile, ...], written: Ranges, added: Ranges, stay: bool
    ) -> tuple[tuple[Tile, ...], Ranges, Ranges]:
        """Tell tiles that are the first on all of their rows, on the side that stays or walks.

        Args:
            written: buffer rows that an earlier tile has overwritten. added: that any has touched.

        Returns:
            The tiles, and `written` and `added` after them.
        """
        on_keys = stay == self.queries_walk
        marked: list[Tile] = []
        for tile in found:
            rows = (tile.keys if on_keys else tile.rows,)
            first = not intersect(rows, added)
            name = "first_on_keys" if on_keys else "first_on_rows"
            marked.append(replace(tile, **{name: first}))
            written = join((*written, *rows)) if first else written
            added = join((*added, *rows))
        return tuple(marked), written, added

    def _gather(
        self, rank: int, shards: tuple[tuple[int, ...], ...], home: Layout, rows: list[Ranges]
    ) -> Gather:
        """How `rows[r]` of the shards that rank r brings together get there from their homes."""
        give = (
            (other, intersect(rows[other], home[rank]))
            for other in range(self.num_ranks)
            if rank in shards[other]
        )
        take = ((owner, intersect(rows[rank], home[owner])) for owner in sorted(shards[rank]))
        return Gather(
            shard_rows=size(home[rank]),
            num_rows=size(rows[rank]),
            give=_parcels(give, home[rank]),
            take=_parcels(take, rows[rank]),
        )

    def _step(self, step: int, rank: int) -> Step:
        origin = self.origin[step][rank]
        held = self.carried[origin][step]
        last = step == self.num_steps - 1
        after = None if last else self.paths[origin][step + 1]
        comes = None if last else self.origin[step + 1][rank]
        came = None if step == 0 else self.paths[origin][step - 1]
        coming = () if comes is None else self.carried[comes][step + 1]
        past = () if step == 0 else self.moved[origin][step - 1]
        found = tiles(*self._ordered(self.stay_rows[rank], held), self.mask)
        marked, written, _ = self._mark(found, (), (), stay=False)
        return Step(
            num_rows=size(held),
            tiles=marked,
            blank=subtract(((0, size(held)),), written),
            pass_out=_parcel(after, self.carried[origin][step + 1], held),
            pass_in=_parcel(self.paths[comes][step] if comes is not None else None, coming, coming),
            partial_in=_parcel(came, past, held),
            partial_out=_parcel(after, self.moved[origin][step], held),
            home_out=_parcels(self._leaving(origin, step), held),
            home_in=_parcels(self._returning(step, rank), self.walk_home[rank]),
        )

    def _leaving(self, origin: int, step: int) -> Iterator[tuple[int, Ranges]]:
        for owner in sorted(self.roles.kv[origin]):
            yield owner, intersect(self.left[origin][step], self.walk_home[owner])

    def _returning(self, step: int, rank: int) -> Iterator[tuple[int, Ranges]]:
        for holder in range(self.num_ranks):
            origin = self.origin[step][holder]
            if rank in self.roles.kv[origin]:
                yield holder, intersect(self.left[origin][step], self.walk_home[rank])


def _rows_of(shards: tuple[int, ...], home: Layout) -> Ranges:
    return join(piece for shard in shards for piece in home[shard])


def _parcel(peer: int | None, rows: Ranges, held: Ranges) -> Parcel | None:
    return None if peer is None or not rows else Parcel(peer, locate(rows, held))


def _parcels(found: Iterator[tuple[int, Ranges]], held: Ranges) -> Parcels:
    parcels = (_parcel(peer, rows, held) for peer, rows in found)
    return tuple(parcel for parcel in parcels if parcel)
