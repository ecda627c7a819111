"""Derives a rank's program (buffers, tiles, messages) from a problem.

A row is sent only to ranks whose tiles read it. Messages of the side that stays are in
lowering/gather_rounds.py, those of walkers in lowering/forwarding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from threading import Lock

from wf_backends.lowering.forwarding import Forwarding
from wf_backends.lowering.gather_rounds import GatherRounds
from wf_backends.lowering.problem import Problem, Reads
from wf_backends.lowering.program import RankProgram, Round, Step
from wf_backends.lowering.tiles import make_tiles
from wf_backends.schedule import Ranges, intersect, size, subtract, union

_DERIVING = Lock()  # ranks may be threads: the first derives a problem, the others read the cache


def lower(problem: Problem, rank: int) -> RankProgram:
    """The program of one rank. All ranks get programs that fit together."""
    with _DERIVING:
        return _derivation(problem).program(rank)


class _Derivation:
    """Derives the programs of a problem, and keeps what several ranks need."""

    def __init__(self, problem: Problem) -> None:
        self.reads = Reads(problem)
        self.forwarding = Forwarding(self.reads, problem.kept)
        self.gathering = GatherRounds(self.reads, problem.host_size)
        self.program = cache(self._program)

    def _program(self, rank: int) -> RankProgram:
        """The program of a rank."""
        stay = _WrittenRows()
        steps = tuple(self._step(step, rank, stay) for step in range(self.reads.num_steps))
        return RankProgram(
            rank=rank,
            queries_walk=self.reads.queries_walk,
            stay=self.gathering.stay(rank),
            walk=self.forwarding.gather(rank),
            steps=steps,
            blank=stay.blank(self.reads.stay_rows(rank)),
        )

    def _step(self, step: int, rank: int, stay: _WrittenRows) -> Step:
        held = self.forwarding.held(step, rank)
        walk = _WrittenRows()
        rounds = tuple(self._rounds(step, rank, held, stay, walk))
        return self.forwarding.step(step, rank, rounds, walk.blank(held))

    def _rounds(
        self, step: int, rank: int, held: Ranges, stay: _WrittenRows, walk: _WrittenRows
    ) -> Iterator[Round]:
        """The rounds of a step. Each tile says whether it is the first on its rows and keys."""
        reads = self.reads
        buffers = reads.ordered(reads.stay_rows(rank), held)
        rows_written, keys_written = reads.ordered(stay, walk)
        for rows, messages in self.gathering.rounds(step, rank):
            tile_args = *reads.ordered(rows, held), reads.mask, buffers, reads.joins_ranges
            unmarked = make_tiles(*tile_args) if held else ()
            marked = [
                replace(
                    tile,
                    held=buffers,
                    first_on_rows=rows_written.add_tile(tile.rows),
                    first_on_keys=keys_written.add_tile(tile.keys),
                )
                for tile in unmarked
            ]
            yield replace(messages, tiles=tuple(marked))


_derivation = lru_cache(maxsize=16)(_Derivation)


class _WrittenRows:
    """Which rows of a buffer of results tiles have written so far."""

    def __init__(self) -> None:
        self.overwritten: Ranges = ()
        self.touched: Ranges = ()

    def add_tile(self, rows: Ranges) -> bool:
        """Record a tile; whether it is the first on all of its rows, and so may overwrite them."""
        is_first = not intersect(rows, self.touched)
        self.touched = union(self.touched, rows)
        if is_first:
            self.overwritten = union(self.overwritten, rows)
        return is_first

    def blank(self, held: Ranges) -> Ranges:
        """The rows of a buffer of `held` that no tile overwrites."""
        return subtract(((0, size(held)),), self.overwritten)
