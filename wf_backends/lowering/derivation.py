"""What one rank does, step by step: buffers, tiles and messages, derived from a schedule.

Pure: standard library only. One side stays (its rows are gathered once and computed on until the
end), the other walks. In the forward, queries stay and keys walk; in the backward either may
walk. Only rows that are read where they land are sent (lowering/forwarding.py); a partial gradient
is sent to its owner as soon as the next rank of the hop does not add to it, and what the owner
itself adds is never sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Literal, TypeVar

from wf_backends.lowering.direction import nearest_first
from wf_backends.lowering.forwarding import Forwarding
from wf_backends.lowering.gather_rounds import GatherRounds
from wf_backends.lowering.program import RankProgram, Round, Step
from wf_backends.lowering.tiles import Parts, Tile, by_part, limits, seen, tiles
from wf_backends.schedule import (
    Band,
    Layout,
    Mask,
    Ranges,
    Schedule,
    Shards,
    intersect,
    join,
    size,
    subtract,
)

T = TypeVar("T")
_DERIVING = Lock()  # ranks that are threads ask together: the first derives, the others read


@dataclass(frozen=True, slots=True)
class Problem:
    """A schedule laid over a sequence: all that the programs of all ranks follow from."""

    schedule: Schedule
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    queries_walk: bool = False
    kept: bool = False
    """Whether walkers gather at first all rows that any step reads, as the other pass does, whose
    gathered rows are kept and used again."""
    host_size: int = 1
    """Neighbouring ranks of one host: of the side that stays, a row that several of them read
    crosses to them once."""


@lru_cache(maxsize=512)
def lower(problem: Problem, rank: int) -> RankProgram:
    """The program of one rank. The same problem gives the same programs on every rank."""
    with _DERIVING:
        return _derived(problem).program(rank)


@lru_cache(maxsize=16)
def _derived(problem: Problem) -> _Derivation:
    return _Derivation(problem)


class _Derivation:
    """All rows of a problem as global positions, derived when the program of a rank needs them."""

    def __init__(self, problem: Problem) -> None:
        self.mask, self.queries_walk = problem.mask, problem.queries_walk
        layouts = (problem.q_layout, problem.kv_layout)
        roles = problem.schedule.turned() if problem.queries_walk else problem.schedule
        self.roles = roles = nearest_first(roles, problem.mask)
        self.stay_home, self.walk_home = layouts[::-1] if problem.queries_walk else layouts
        self.num_ranks, self.num_steps = roles.num_ranks, roles.num_steps
        self.stay_rows, self._seen = cache(self._brought), cache(self._find_seen)
        self._nearby, self._near = self._make_nearby(), cache(self._find_near)
        homes = self.stay_home, self.walk_home
        sides = self._ordered("q", "k")
        parts = (partial(self._parts, *one) for one in zip(homes, sides, strict=True))
        self._stay, self._walk = map(cache, parts)
        through = roles.has_laps and self.mask.is_dense
        self.forwarding = Forwarding(roles, self.walk_home, self._wanted, problem.kept, through)
        gathered = roles.q, self.num_steps, self.stay_home, self.stay_rows, self._met
        self.gathering = GatherRounds(problem.host_size, *gathered)

    def _met(self, step: int, rank: int) -> Ranges:
        """The rows of what stays with a rank that some tile of the step uses."""
        return self._seen(step, rank)[0]

    def _wanted(self, step: int, origin: int) -> Ranges:
        """The rows of a walker that some tile of the step's rank uses."""
        return self._seen(step, self.roles.place(step, origin))[1]

    def _brought(self, rank: int) -> Ranges:
        """The rows of what stays with a rank that any tile uses."""
        used = {self._met(step, rank) for step in range(self.num_steps)}
        return join(piece for rows in used for piece in rows)

    def _find_seen(self, step: int, rank: int) -> tuple[Ranges, Ranges]:
        """The rows that some tile uses, of what stays and of what walks."""
        origin = self.roles.origin(step, rank)
        stay, walk = self.roles.q[rank], self.roles.kv[origin]
        if self._nearby and self._near(stay).isdisjoint(walk):
            return (), ()
        sides = self._ordered(self._stay(stay), self._walk(walk))
        found = self._ordered(*seen(*sides, self.mask))
        return found if found[0] else ((), ())

    def _make_nearby(self) -> Nearby | None:
        """Where walkers lie, if a window keeps most of them from most ranks."""
        band = self.mask.band
        return Nearby(self.walk_home, band, self.queries_walk) if band.edges == 2 else None

    def _find_near(self, stay: Shards) -> frozenset[int]:
        """The shards that walk of which some row may meet one of these that stay."""
        assert self._nearby is not None
        return self._nearby.of(tuple(piece for shard in stay for piece in self.stay_home[shard]))

    def _parts(self, home: Layout, side: Literal["q", "k"], shards: Shards) -> Parts:
        """The rows of some shards, by part of the mask."""
        rows = join(piece for shard in shards for piece in home[shard])
        return by_part(rows, self.mask, side)

    def _ordered(self, stay: T, walk: T) -> tuple[T, T]:
        """(queries, keys) from (stay, walk); and back, since it is its own inverse."""
        return (walk, stay) if self.queries_walk else (stay, walk)

    def program(self, rank: int) -> RankProgram:
        stay = _Touched()
        steps = tuple(self._step(step, rank, stay) for step in range(self.num_steps))
        return RankProgram(
            rank=rank,
            queries_walk=self.queries_walk,
            stay=self.gathering.stay(rank),
            walk=self.forwarding.gather(rank),
            steps=steps,
            blank=subtract(((0, size(self.stay_rows(rank))),), stay.written),
        )

    def _rounds(
        self, step: int, rank: int, held: Ranges, stay: _Touched, walk: _Touched
    ) -> Iterator[Round]:
        """The rounds of a step, each tile told whether it is the first on its rows and keys."""
        for rows, messages in self.gathering.rounds(step, rank):
            buffers = self._ordered(self.stay_rows(rank), held)
            found = tiles(*self._ordered(rows, held), self.mask, buffers) if held else ()
            marked = tuple(self._marked(tile, buffers, stay, walk) for tile in found)
            yield replace(messages, tiles=marked)

    def _marked(
        self, tile: Tile, held: tuple[Ranges, Ranges], stay: _Touched, walk: _Touched
    ) -> Tile:
        rows, keys = self._ordered(stay, walk)
        first = {"first_on_rows": rows.first(tile.rows), "first_on_keys": keys.first(tile.keys)}
        return replace(tile, held=held, **first)

    def _step(self, step: int, rank: int, stay: _Touched) -> Step:
        held, walk = self.forwarding.held(step, rank), _Touched()
        rounds = tuple(self._rounds(step, rank, held, stay, walk))
        blank = subtract(((0, size(held)),), walk.written)
        return self.forwarding.step(step, rank, rounds, blank)


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


class Nearby:
    """The shards of one side whose rows a row of the other side may meet.

    Args:
        home: the rows of every shard. band: of positions, keys beside queries.
        queries: whether these are shards of queries, and not of keys.
    """

    def __init__(self, home: Layout, band: Band, queries: bool) -> None:
        pieces = sorted((*piece, at) for at, shard in enumerate(home) for piece in shard)
        self._starts = [start for start, _, _ in pieces]
        self._stops = [stop for _, stop, _ in pieces]
        self._shards = [shard for _, _, shard in pieces]
        sides = limits(band)
        self._before, self._after = sides[::-1] if queries else sides

    def of(self, rows: Ranges) -> frozenset[int]:
        """The shards with a row that some of these rows, of the other side, may meet."""
        found: set[int] = set()
        for start, stop in rows:
            first = bisect_right(self._stops, start - self._before)
            last = bisect_left(self._starts, stop + self._after)
            found.update(self._shards[first:last])
        return frozenset(found)
