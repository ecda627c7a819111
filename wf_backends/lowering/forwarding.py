"""The rows of walkers that ranks hold in each step, and the messages that bring them there.

A rank holds a row only if it reads it. If the next rank of the hop reads the row too, it is
forwarded, and later its partial result with it. If not, the partial result is sent to the owner,
and the owner sends the row to the next rank that reads it: one message for each reader. Everything
is computed on demand and cached: one rank of thousands asks only for its own part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from functools import cache, cached_property, partial

from wf_backends.lowering.problem import Reads
from wf_backends.lowering.program import (
    Exchange,
    Gather,
    PeerRows,
    Round,
    Step,
    hop_parcels,
    parcels,
    parcels_of_peers,
)
from wf_backends.schedule import Ranges, intersect, join, ranks_by_shard, size, subtract, union

RowsOfStep = Callable[[int], Ranges]  # step -> rows (positions)


class WalkerRows:
    """Rows (positions) of one walker, by step. "The rank" is the one that holds it in the step.

    Args:
        read: rows that the rank reads. owned: rows of the walker that the rank owns.
        gathers_all: at step 0, gather all rows that any step reads.
    """

    def __init__(
        self, read: RowsOfStep, owned: RowsOfStep, num_steps: int, gathers_all: bool = False
    ) -> None:
        self.read, self.owned, self.num_steps = cache(read), owned, num_steps
        self.gathers_all = gathers_all
        self.forwarded = cache(self._forwarded)
        """Of the rows that the rank holds, those that the rank of the step before forwards."""
        self.partials_forwarded = cache(self._partials_forwarded)
        """The rows whose partial results are sent to the rank of the next step."""

    def needed(self, step: int) -> Ranges:
        """The rows that the rank holds."""
        return self._read_by_any if self.gathers_all and step == 0 else self.read(step)

    def from_owner(self, step: int) -> Ranges:
        """The rows that owners send for this step, since they are not forwarded."""
        return subtract(self.needed(step), self.forwarded(step))

    def partials_to_owner(self, step: int) -> Ranges:
        """The rows whose partial results are sent to their owners after this step."""
        return subtract(self.read(step), self.partials_forwarded(step))

    @cached_property
    def _read_by_any(self) -> Ranges:
        return join(piece for step in range(self.num_steps) for piece in self.read(step))

    def _forwarded(self, step: int) -> Ranges:
        if step == 0:
            return ()
        # an owner sends its own rows itself, and does not need its own rows sent
        owned = union(self.owned(step - 1), self.owned(step))
        return subtract(intersect(self.needed(step - 1), self.needed(step)), owned)

    def _partials_forwarded(self, step: int) -> Ranges:
        held_next = self.needed(step + 1) if step + 1 < self.num_steps else ()
        return intersect(subtract(self.read(step), self.owned(step)), held_next)


class Forwarding:
    """The rows of all walkers of a problem, and their messages. `kept`: as in `Problem`."""

    def __init__(self, reads: Reads, kept: bool) -> None:
        self.reads, self.schedule, self.layout = reads, reads.schedule, reads.walk_layout
        self.num_steps = reads.num_steps
        self._origins = ranks_by_shard(reads.walk_shards)
        """[owner] -> the origins of the walkers that contain its rows."""
        self._gathers_all = kept and self.schedule.gathers()[1]
        self.walker = cache(self._walker)
        """The rows of the walker that a rank holds at step 0."""
        self._steps_with_walkers = cache(self._find_steps_with_walkers)
        self._owner_sends = cache(self._find_owner_sends)

    def held(self, step: int, rank: int) -> Ranges:
        """The rows of walkers that a rank holds in a step."""
        return self.walker(self.schedule.origins[step][rank]).needed(step)

    def gather(self, rank: int) -> Gather:
        """The messages that bring a rank's walker of step 0 from its owners."""
        held, own = self.held(0, rank), self.layout[rank]
        sends = [(reader, intersect(self.held(0, reader), own)) for reader in self._origins[rank]]
        send = parcels_of_peers(rank, sends, own)
        receive = parcels_of_peers(rank, self._by_owner(rank, held), held)
        return Gather(size(own), size(held), send, receive)

    def step(self, step: int, rank: int, rounds: tuple[Round, ...], blank: Ranges) -> Step:
        """A step of a rank's program, with all exchanges of walkers."""
        origin, own = self.schedule.origins[step][rank], self.layout[rank]
        walker = self.walker(origin)
        held = walker.needed(step)
        hop, partial_results = self._along_hop(step, rank)
        next_held, from_owners = self._next_held(step, rank)
        to_owners = self._by_owner(origin, walker.partials_to_owner(step))
        return Step(
            num_rows=size(held),
            rounds=rounds,
            blank=blank,
            next_num_rows=size(next_held),
            hop=hop,
            owner=Exchange(
                parcels_of_peers(rank, self._owner_sends(rank).get(step, ()), own),
                parcels_of_peers(rank, from_owners, next_held),
            ),
            partial=partial_results,
            reduce=Exchange(
                parcels_of_peers(rank, to_owners, held),
                parcels_of_peers(rank, self._partials_of_owner(step, rank), own),
            ),
        )

    def _walker(self, origin: int) -> WalkerRows:
        read, owned = partial(self.reads.walker_rows, origin), partial(self._owned, origin)
        return WalkerRows(read, owned, self.num_steps, self._gathers_all)

    def _owned(self, origin: int, step: int) -> Ranges:
        """The rows of a walker that belong to the rank that holds it in a step."""
        rank = self.schedule.holders[step][origin]
        return self.layout[rank] if rank in self.reads.walk_shards[origin] else ()

    def _along_hop(self, step: int, rank: int) -> tuple[Exchange, Exchange]:
        """What goes along the hop after a step: rows of walkers, and their partial results."""
        if step + 1 == self.num_steps:
            return Exchange(), Exchange()
        origin, next_origin = (self.schedule.origins[s][rank] for s in (step, step + 1))
        receiver, leaving = self.schedule.holders[step + 1][origin], self.walker(origin)
        sender, coming = self.schedule.holders[step][next_origin], self.walker(next_origin)
        held, next_held = leaving.needed(step), coming.needed(step + 1)
        rows = Exchange(
            hop_parcels(receiver, leaving.forwarded(step + 1), held, leaving.needed(step + 1)),
            hop_parcels(sender, coming.forwarded(step + 1), next_held, coming.needed(step)),
        )
        partial_results = Exchange(
            parcels(receiver, leaving.partials_forwarded(step), held, whole=True),
            parcels(sender, coming.partials_forwarded(step), next_held, whole=True),
        )
        return rows, partial_results

    def _find_steps_with_walkers(self, rank: int) -> list[int]:
        """Step 0, and the later steps in which a rank holds any rows of walkers.

        Rows that owners send for a step of the list arrive during the step before it in the list.
        """
        return [0, *(step for step in range(1, self.num_steps) if self.held(step, rank))]

    def _find_owner_sends(self, owner: int) -> defaultdict[int, list[PeerRows]]:
        """By step, what an owner sends of its rows to ranks that read them later."""
        sends: defaultdict[int, list[PeerRows]] = defaultdict(list)
        for origin in self._origins[owner]:
            for step in range(1, self.num_steps):
                rows = intersect(self.walker(origin).from_owner(step), self.layout[owner])
                if rows:
                    reader = self.schedule.holders[step][origin]
                    steps = self._steps_with_walkers(reader)
                    sends[steps[steps.index(step) - 1]].append((reader, rows))
        return sends

    def _next_held(self, step: int, rank: int) -> tuple[Ranges, list[PeerRows]]:
        """The rows that a rank holds next after a step, and those that owners send in the step."""
        steps = self._steps_with_walkers(rank)
        later = steps[bisect_right(steps, step) :]
        if not later:
            return (), []
        origin = self.schedule.origins[later[0]][rank]
        walker = self.walker(origin)
        from_owner = walker.from_owner(later[0]) if step in steps else ()
        return walker.needed(later[0]), self._by_owner(origin, from_owner)

    def _by_owner(self, origin: int, rows: Ranges) -> list[PeerRows]:
        """These rows of a walker, by their owners."""
        owners = self.reads.walk_shards[origin]
        return [(owner, intersect(rows, self.layout[owner])) for owner in owners]

    def _partials_of_owner(self, step: int, owner: int) -> list[PeerRows]:
        """The rows whose partial results an owner gets after a step, by sender."""
        partials: list[PeerRows] = []
        for origin in self._origins[owner]:
            rows = intersect(self.walker(origin).partials_to_owner(step), self.layout[owner])
            partials.append((self.schedule.holders[step][origin], rows))
        return sorted(partials)
