"""One pass of a program: its messages, with the tiles computed while they travel.

Buffers are rows-first. Every message is posted as soon as its rows are there, and waited for
when its rows are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from wf_backends.comm import Communicator
from wf_backends.lowering import Exchange, Gather, RankProgram, Stay, Step, Tile
from wf_backends.runtime.messages import (
    Accumulators,
    Messages,
    Place,
    Tensors,
    Total,
    copy,
    empty_rows,
    pack,
    scatter,
    span,
)


class ComputeTile(Protocol):
    """Computes one tile, and combines its results into the buffers of both sides' results."""

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None: ...


class Side(NamedTuple):
    """The input of a pass from one side: queries or keys."""

    shard: Tensors
    """This rank's own rows."""
    found: Accumulators
    """What is collected for the side's rows."""
    kept: Tensors = ()
    """The first of the gathered tensors, where an earlier pass kept them."""


class Results(NamedTuple):
    """What a pass gives of one side."""

    own: Tensors
    """What was found for this rank's own rows."""
    gathered: Tensors
    """The rows that this rank computed on; if they walk, those that it held in the first step."""


def run(
    program: RankProgram,
    comm: Communicator,
    name: str,
    compute: ComputeTile,
    queries: Side,
    keys: Side,
) -> tuple[Results, Results]:
    """Run a program on one rank; the results of queries and of keys.

    Args:
        name: of the pass, in labels of messages, spans and errors.
    """
    turn = program.queries_walk
    stay, walk = (keys, queries) if turn else (queries, keys)
    one = _Pass(program, comm, name, compute, stay, walk)
    for index in program.busy_steps:
        inbound = one.post(index)
        one.compute(index)
        for messages in inbound:
            messages.wait()
    stayed, walked = one.finish()
    return (walked, stayed) if turn else (stayed, walked)


class _Pass:
    """The state of a pass: the rows of both sides, and their results so far."""

    def __init__(
        self,
        program: RankProgram,
        comm: Communicator,
        name: str,
        compute: ComputeTile,
        stay: Side,
        walk: Side,
    ) -> None:
        self.program, self.comm, self.name, self.tile = program, comm, name, compute
        self.label = ""
        """Of the step's messages."""
        self.in_flight: list[Messages] = []
        self.walkers = walk.shard
        anew = self._gather(program.walk, self.walkers[len(walk.kept) :])
        self.gathered = self.held = (*walk.kept, *anew)
        self.arriving: Tensors = ()
        """The buffer of the next step in which this rank reads anything, as it fills."""
        self.spare: Tensors = ()
        """A buffer that was held in an earlier step."""
        self.moving = walk.found.prepare(0, ())
        """What was found in the last step for the rows that it held; at first it held none."""
        self.walk_found, self.total = walk.found, Total(program.walk.shard_rows, walk.found)
        self.shard = stay.shard[len(stay.kept) :]
        self.room = _room(program.stay, self.shard)
        self.stay = (*stay.kept, *self.room)
        self.stay_found = stay.found
        self.partial = stay.found.prepare(program.stay.num_rows, program.blank)
        self.add_partial = partial(scatter, self.partial, stay.found.combine)
        self.stay_total = Total(program.stay.shard_rows, stay.found)
        self.returning: list[Messages] = []
        self.fetched = [self._fetch(one.fetch, self.shard) for one in program.steps[0].rounds]

    def post(self, index: int) -> list[Messages]:
        """Start the messages of a step: forward held rows, send own rows, receive the next ones.

        Returns:
            What must have arrived before the next step.
        """
        before = self.program.steps[index - 1] if index else None
        step = self.program.steps[index]
        if index:
            self.spare = () if self.held is self.gathered else self.held
            self.held = self.arriving if step.num_rows else ()
            self.arriving = () if step.num_rows else self.arriving
        if (step.hop_in or step.owner_in) and not self.arriving:
            fits = self.spare and self.spare[0].size(0) == step.next_num_rows
            self.arriving = self.spare if fits else empty_rows(step.next_num_rows, self.walkers)
        self.label = f"{self.name} step {index}"
        hop = Messages(self.comm, self.label, self.in_flight)
        for parcel in step.hop_out:
            hop.send(parcel, self.held)
        for parcel in step.hop_in:
            hop.receive(parcel, self.arriving)
        if self.walk_found.shapes:
            self._move_partials(hop, before, step)
        if not (step.owner_out or step.owner_in):
            return [hop.post()]
        return self._send_own(hop, step, self.program.hop_peers[index])

    def compute(self, index: int) -> None:
        """Compute the tiles of a step, round by round; send finished results to their owners."""
        rounds = self.program.steps[index].rounds
        if self.program.stay_is_local:
            for one in rounds:
                self._tiles(one.tiles)
            return
        passed = back = None
        for at, one in enumerate(rounds):
            for arriving in (self.fetched[at] if index == 0 else None, passed):
                if arriving:
                    arriving.wait()
            passed = self._fetch(one.pass_on, self.room)
            self._tiles(one.tiles)
            if back:
                back.wait()
            back = self._return(one.pass_back, self.add_partial)
            self._return(one.home, self.stay_total.add)

    def _tiles(self, tiles: Sequence[Tile]) -> None:
        """Compute tiles, which hides what travels."""
        with span("compute", self.label):
            for tile in tiles:
                if self.program.queries_walk:
                    self.tile(tile, self.held, self.stay, self.moving, self.partial)
                else:
                    self.tile(tile, self.stay, self.held, self.partial, self.moving)
                if self.comm.needs_polls:
                    for messages in self.in_flight:
                        messages.poll()

    def finish(self) -> tuple[Results, Results]:
        """(side that stays, side that walks), once all partial results are at their owners."""
        if self.walk_found.shapes:
            last = self._messages("home")
            self._move_partials(last, self.program.steps[-1], None)
            last.post().wait()
        stay = self.program.stay
        if stay.own_in_shard:
            self.stay_total.add(
                stay.own_in_shard, tuple([pack(x, stay.own_in_buffer) for x in self.partial])
            )
        for messages in self.returning:
            messages.wait()
        for messages in list(self.in_flight):  # those that only sent
            messages.wait()
        stayed = Results(self.stay_total.buffers(), self.stay)
        return stayed, Results(self.total.buffers(), self.gathered)

    def _messages(self, what: str) -> Messages:
        return Messages(self.comm, f"{self.name} {what}", self.in_flight)

    def _gather(self, rows: Gather, shard: Tensors) -> Tensors:
        """The walkers of the first step; the shard itself if that is all that this rank reads."""
        messages = self._messages("gather")
        for parcel in rows.send:
            messages.send(parcel, shard)
        if len(rows.receive) == 1 and rows.receive[0].peer == self.comm.rank:
            held = messages.to_self.pop(0)
        else:
            held = empty_rows(rows.num_rows, shard)
            for parcel in rows.receive:
                messages.receive(parcel, held)
        messages.post().wait()
        return held

    def _fetch(self, exchange: Exchange, rows: Tensors) -> Messages | None:
        """Start an exchange of rows that stay: some of these to other ranks, theirs to this one."""
        if not (exchange.send or exchange.receive):
            return None
        messages = self._messages("gather")
        for parcel in exchange.send:
            messages.send(parcel, rows)
        for parcel in exchange.receive:
            messages.receive(parcel, self.room)
        return messages.post()

    def _send_own(self, hop: Messages, step: Step, met: frozenset[int]) -> list[Messages]:
        """Post the hop; send own rows to whoever reads them next, and ask for what owners give.

        Who only gives does not wait for it, unless it goes to a peer of the hop.
        """
        near, owners = met | {self.comm.rank}, Messages(self.comm, hop.label, self.in_flight)
        for parcel in step.owner_out:
            (hop if parcel.peer in near else owners).send(parcel, self.walkers)
        for parcel in step.owner_in:
            (hop if parcel.peer in near else owners).receive(parcel, self.arriving)
        hop.post()
        owners.post()
        return [hop, owners] if any(parcel.peer not in near for parcel in step.owner_in) else [hop]

    def _move_partials(self, hop: Messages, before: Step | None, step: Step | None) -> None:
        """Send the last step's partial results to the next rank of the hop, or to their owners.

        Those that arrive are added to the results of this step, or to the total of own rows.
        """
        leaving, self.moving, wire = self.moving, (), self.walk_found.wire
        if step:
            self.moving = self.walk_found.prepare(step.num_rows, step.blank)
        if before is None or not leaving:
            return
        for parcel in (*before.partial_out, *before.home_out):
            hop.send(parcel, leaving, wire)
        for parcel in step.partial_in if step else ():
            onward = partial(scatter, self.moving, self.walk_found.combine)
            hop.collect(parcel, leaving, onward, wire)
        for parcel in before.home_in:
            hop.collect(parcel, leaving, self.total.add, wire)

    def _return(self, exchange: Exchange, place: Place) -> Messages | None:
        """Send finished results on towards the rows' owners; put in their place what arrives."""
        if not (exchange.send or exchange.receive):
            return None
        messages, wire = self._messages("home"), self.stay_found.wire
        for parcel in exchange.send:
            messages.send(parcel, self.partial, wire)
        for parcel in exchange.receive:
            messages.collect(parcel, self.partial, place, wire)
        self.returning.append(messages.post())
        return messages


def _room(stay: Stay, shard: Tensors) -> Tensors:
    """The buffer of the rows that stay, with this rank's own; the shard if there are no others."""
    if stay.own_in_shard == ((0, stay.num_rows),) and stay.num_rows == stay.shard_rows:
        return shard
    buffers = empty_rows(stay.num_rows, shard)
    scatter(
        buffers, copy, stay.own_in_buffer, tuple([pack(own, stay.own_in_shard) for own in shard])
    )
    return buffers
