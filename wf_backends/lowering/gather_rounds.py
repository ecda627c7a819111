"""In which order a rank computes the rows that stay with it, and what travels in between.

Pure: standard library only. A rank has its own rows from the start: they are computed first,
while those of other owners arrive, and last, while results are sent to other owners. The
results of an owner's rows are sent after the last step that uses one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from wf_backends.lowering.program import Exchange, Parcels, Round, Stay, parcels
from wf_backends.schedule import (
    Layout,
    Ranges,
    Shards,
    carriers,
    intersect,
    join,
    locate,
    size,
    subtract,
)

MAX_ROUNDS = 3
"""Rounds of one step beside that of a rank's own rows: more owners share rounds, so that kernels
still have something to do."""


def bundles(count: int) -> list[int]:
    """How many of `count` owners share each round."""
    rounds = min(count, MAX_ROUNDS)
    return [count // rounds + (at < count % rounds) for at in range(rounds)] if count else []


Slots = tuple[int | None, ...]


def pairs(size: int, member: int) -> Slots:
    """Whom a member of a team meets in each round, when every two meet once, all in pairs.

    None: nobody, which happens once to each if the team is odd. Where the size is a power of two,
    neighbours meet first; else the circle method of tournaments.
    """
    if size & (size - 1) == 0:
        return tuple(member ^ turn for turn in range(1, size))
    odd = size - 1 + size % 2  # an even team's last member meets whoever would meet itself
    found: list[int | None] = []
    for turn in range(odd):
        if member == odd:
            found.append(turn * (odd + 1) // 2 % odd)
            continue
        other = (turn - member) % odd
        alone = odd if odd < size else None
        found.append(alone if other == member else other)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows (positions) that one round computes; those of `owners` come from them and go back."""

    rows: Ranges
    owners: tuple[int, ...] = ()


class GatherRounds:
    """The rounds of all ranks.

    Args:
        shards: whose rows each rank brings together. home: the rows that each rank owns.
        rows: rank -> those that it brings together. met: (step, rank) -> those that it uses.
    """

    def __init__(
        self,
        shards: tuple[Shards, ...],
        num_steps: int,
        home: Layout,
        rows: Callable[[int], Ranges],
        met: Callable[[int, int], Ranges],
    ) -> None:
        self.shards, self.num_steps, self.home = shards, num_steps, home
        self.rows, self.met = rows, met
        self.carriers = carriers(shards)
        self._is_team = cache(self._all_bring)
        self.slots, self.groups = cache(self._slots), cache(self._groups)
        self.last, self.holders = cache(self._last), cache(self._holders)

    def stay(self, rank: int) -> Stay:
        """The buffer of the rows that a rank brings together."""
        mine = intersect(self.rows(rank), self.home[rank])
        return Stay(
            shard_rows=size(self.home[rank]),
            num_rows=size(self.rows(rank)),
            mine=locate(mine, self.home[rank]),
            at=locate(mine, self.rows(rank)),
        )

    def rounds(self, step: int, rank: int) -> Iterator[tuple[Ranges, Round]]:
        """(rows, messages) of every round: as many as any holder of this rank's rows has."""
        others = self.holders(rank)
        for index in range(max(len(self.groups(step, one)) for one in (rank, *others))):
            group = self._group(step, rank, index)
            takers = [other for other in others if rank in self._group(step, other, index).owners]
            fetch = Exchange()
            if step == 0:
                fetch = Exchange(self._given(rank, takers), self._held(rank, group.owners))
            gone = [owner for owner in group.owners if self.last(rank, owner) == step]
            back = [other for other in takers if self.last(other, rank) == step]
            home = Exchange(self._held(rank, gone), self._given(rank, back))
            yield group.rows, Round((), fetch, home)

    def _slots(self, rank: int) -> Slots:
        """The other owners of a rank's rows, in the order in which their rounds are taken.

        In a team, where all bring the same together, members exchange in pairs: a link then
        carries one message each way, and gloo, which is slow if a send is posted before the
        receive from the same peer, finds both together.
        """
        team = self.shards[rank]
        if rank in team and self._is_team(team):
            met = pairs(len(team), team.index(rank))
            slots = tuple(None if at is None else team[at] for at in met)
        else:
            slots = tuple(sorted(team, key=lambda owner: (owner < rank, owner)))
        return tuple(owner if self._shares(rank, owner) else None for owner in slots)

    def _all_bring(self, team: Shards) -> bool:
        """Whether all members of the team bring the team's rows together."""
        return all(self.shards[member] == team for member in team)

    def _shares(self, rank: int, owner: int | None) -> bool:
        """Whether the rank holds rows of this other owner."""
        return owner not in (None, rank) and bool(intersect(self.rows(rank), self.home[owner]))

    def _holders(self, rank: int) -> list[int]:
        """The other ranks that hold rows of this one."""
        return [other for other in self.carriers[rank] if self._shares(other, rank)]

    def _last(self, rank: int, owner: int) -> int:
        """The last step that uses a row of the owner's which the rank holds."""
        back, home = range(self.num_steps - 1, -1, -1), self.home[owner]
        return next(step for step in back if intersect(self.met(step, rank), home))

    def _groups(self, step: int, rank: int) -> list[Group]:
        """Own rows first in step 0, and last in later ones; a place for every bundle of slots."""
        rows, slots = self.rows(rank), self.slots(rank)
        here = [owner for owner in slots if owner is not None]
        alone = [owner for owner in here if step == 0 or self.last(rank, owner) == step]
        if not alone:
            return [Group(rows)]
        groups, edges = list[Group](), accumulate(bundles(len(slots)), initial=0)
        for first, stop in pairwise(edges):
            owners = tuple(owner for owner in slots[first:stop] if owner in alone)
            held = join(piece for owner in owners for piece in self.home[owner])
            groups.append(Group(intersect(rows, held), owners))
        rest = Group(subtract(rows, join(piece for group in groups for piece in group.rows)))
        return [rest, *groups] if step == 0 else [*groups, rest]

    def _group(self, step: int, rank: int, index: int) -> Group:
        groups = self.groups(step, rank)
        return groups[index] if index < len(groups) else Group(())

    def _given(self, rank: int, takers: Sequence[int]) -> Parcels:
        """This rank's own rows that others hold, in its own shard."""
        home = self.home[rank]
        found = (parcels(to, intersect(self.rows(to), home), home) for to in takers)
        return tuple(parcel for several in found for parcel in several)

    def _held(self, rank: int, owners: Sequence[int]) -> Parcels:
        """The rows of other owners, in this rank's buffer."""
        rows = self.rows(rank)
        found = (parcels(of, intersect(rows, self.home[of]), rows) for of in owners)
        return tuple(parcel for several in found for parcel in several)
