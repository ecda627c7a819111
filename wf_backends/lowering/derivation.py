"""What one rank does, step by step: buffers, tiles and messages, derived from a problem.

Pure: standard library only. Only rows that are read where they land are sent. Those of the side
that stays: lowering/gather_rounds.py; those of the side that walks: lowering/forwarding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from threading import Lock

from wf_backends.lowering.forwarding import Forwarding
from wf_backends.lowering.gather_rounds import GatherRounds
from wf_backends.lowering.problem import Problem, Reads
from wf_backends.lowering.program import RankProgram, Round, Step
from wf_backends.lowering.tiles import tiles
from wf_backends.schedule import Ranges, intersect, join, size, subtract

_DERIVING = Lock()  # ranks that are threads ask together: the first derives, the others read


@lru_cache(maxsize=512)
def lower(problem: Problem, rank: int) -> RankProgram:
    """The program of one rank. The same problem gives the same programs on every rank."""
    with _DERIVING:
        return _derived(problem).program(rank)


@lru_cache(maxsize=16)
def _derived(problem: Problem) -> _Derivation:
    return _Derivation(problem)


class _Derivation:
    """The programs of a problem, and what several ranks' have in common."""

    def __init__(self, problem: Problem) -> None:
        self.reads = Reads(problem)
        self.forwarding = Forwarding(self.reads, problem.kept)
        self.gathering = GatherRounds(self.reads, problem.host_size)

    def program(self, rank: int) -> RankProgram:
        """What a rank does."""
        stay = _Touched()
        steps = tuple(self._step(step, rank, stay) for step in range(self.reads.num_steps))
        return RankProgram(
            rank=rank,
            queries_walk=self.reads.queries_walk,
            stay=self.gathering.stay(rank),
            walk=self.forwarding.gather(rank),
            steps=steps,
            blank=stay.blank(self.reads.stay_rows(rank)),
        )

    def _step(self, step: int, rank: int, stay: _Touched) -> Step:
        held, walk = self.forwarding.held(step, rank), _Touched()
        rounds = tuple(self._rounds(step, rank, held, stay, walk))
        return self.forwarding.step(step, rank, rounds, walk.blank(held))

    def _rounds(
        self, step: int, rank: int, held: Ranges, stay: _Touched, walk: _Touched
    ) -> Iterator[Round]:
        """The rounds of a step, each tile told whether it is the first on its rows and keys."""
        reads = self.reads
        buffers = reads.ordered(reads.stay_rows(rank), held)
        on_rows, on_keys = reads.ordered(stay, walk)
        for rows, messages in self.gathering.rounds(step, rank):
            found = tiles(*reads.ordered(rows, held), reads.mask, buffers) if held else ()
            marked = [
                replace(
                    tile,
                    held=buffers,
                    first_on_rows=on_rows.first(tile.rows),
                    first_on_keys=on_keys.first(tile.keys),
                )
                for tile in found
            ]
            yield replace(messages, tiles=tuple(marked))


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

    def blank(self, held: Ranges) -> Ranges:
        """The rows of a buffer of `held` that no tile overwrites."""
        return subtract(((0, size(held)),), self.written)
