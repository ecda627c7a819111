"""Runs one pass of a program: posts its messages and computes its tiles in the meantime.

Buffers are rows-first. Every message is posted as soon as the rows to send are ready, and waited
for when the received rows are needed.
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
    PutRows,
    Tensors,
    Total,
    copy,
    empty_rows,
    pack,
    scatter,
    span,
)


class ComputeTile(Protocol):
    """Computes a tile, and combines its results into the result buffers of queries and of keys."""

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, q_results: Tensors, k_results: Tensors
    ) -> None: ...


class PassInput(NamedTuple):
    """The input of a pass from one side: queries or keys."""

    shard: Tensors
    """This rank's own rows."""
    accumulators: Accumulators
    """The form of the results for the side's rows."""
    kept: Tensors = ()
    """The first of the gathered tensors, if an earlier pass kept them."""


class PassOutput(NamedTuple):
    """The output of a pass for one side."""

    shard_results: Tensors
    """The sums for this rank's own rows."""
    gathered: Tensors
    """The rows that this rank computed on; of walkers those that it held in the first step."""


def run(
    program: RankProgram,
    comm: Communicator,
    name: str,
    compute: ComputeTile,
    queries: PassInput,
    keys: PassInput,
) -> tuple[PassOutput, PassOutput]:
    """Run a program on one rank, and return the results for queries and for keys.

    Args:
        name: of the pass, in labels of messages, spans and errors.
    """
    stay, walk = (keys, queries) if program.queries_walk else (queries, keys)
    running = _RunningPass(program, comm, name, compute, stay, walk)
    for index in program.busy_steps:
        inbound = running.post(index)
        running.compute(index)
        inbound.wait()
    stay_results, walk_results = running.finish()
    return (walk_results, stay_results) if program.queries_walk else (stay_results, walk_results)


class _RunningPass:
    """The state of a pass: the rows of both sides, and their results so far."""

    def __init__(
        self,
        program: RankProgram,
        comm: Communicator,
        name: str,
        compute: ComputeTile,
        stay: PassInput,
        walk: PassInput,
    ) -> None:
        self.program, self.comm, self.name, self.compute_tile = program, comm, name, compute
        self.step_label = ""
        self.in_flight: list[Messages] = []

        self.walk_shard = walk.shard
        gathered = self._gather(program.walk, walk.shard[len(walk.kept) :])
        self.gathered = self.held = (*walk.kept, *gathered)
        """gathered: the walkers of the first step. held: of the latest step that has any."""
        self.next_held: Tensors = ()
        """Receives the walkers of the next step in which this rank reads any."""
        self.spare: Tensors = ()
        """Walkers of an earlier step, whose buffers may be used again."""
        self.walk_accumulators = walk.accumulators
        self.walk_partial = walk.accumulators.prepare(0, ())
        """Partial results of the held rows; before the first step none are held."""
        self.walk_total = Total(program.walk.shard_rows, walk.accumulators)

        self.stay_shard = stay.shard[len(stay.kept) :]
        self.fetch_buffers = _fetch_buffers(program.stay, self.stay_shard)
        self.stay = (*stay.kept, *self.fetch_buffers)
        self.stay_accumulators = stay.accumulators
        self.stay_partial = stay.accumulators.prepare(program.stay.num_rows, program.blank)
        self.add_to_stay_partial = partial(scatter, self.stay_partial, stay.accumulators.combine)
        self.stay_total = Total(program.stay.shard_rows, stay.accumulators)
        self.fetches = [self._fetch(r.fetch, self.stay_shard) for r in program.steps[0].rounds]

    def post(self, index: int) -> Messages:
        """Start the messages of a step: forward held rows, send own rows, receive the next rows.

        They must have arrived before the next step.
        """
        previous = self.program.steps[index - 1] if index > 0 else None
        step = self.program.steps[index]
        if index > 0 and step.num_rows:
            self.spare = () if self.held is self.gathered else self.held
            self.held, self.next_held = self.next_held, ()
        if (step.hop.receive or step.owner.receive) and not self.next_held:
            fits = self.spare and self.spare[0].size(0) == step.next_num_rows
            self.next_held = self.spare if fits else empty_rows(step.next_num_rows, self.walk_shard)
        self.step_label = f"{self.name} step {index}"
        messages = Messages(self.comm, self.step_label, self.in_flight)
        messages.send(step.hop.send, self.held)
        messages.receive(step.hop.receive, self.next_held)
        if self.walk_accumulators.shapes:
            self._move_partials(messages, previous, step)
        messages.send(step.owner.send, self.walk_shard)
        messages.receive(step.owner.receive, self.next_held)
        return messages.post()

    def compute(self, index: int) -> None:
        """Compute the tiles of a step, round by round; send finished results to their owners."""
        rounds = self.program.steps[index].rounds
        if self.program.stay_is_local:
            for round_ in rounds:
                self._compute_tiles(round_.tiles)
            return
        passed_on = passed_back = None
        for i, round_ in enumerate(rounds):
            for inbound in (self.fetches[i] if index == 0 else None, passed_on):
                if inbound:
                    inbound.wait()
            passed_on = self._fetch(round_.pass_on, self.fetch_buffers)
            self._compute_tiles(round_.tiles)
            if passed_back:
                passed_back.wait()
            passed_back = self._return(round_.pass_back, self.add_to_stay_partial)
            self._return(round_.reduce, self.stay_total.add)

    def _compute_tiles(self, tiles: Sequence[Tile]) -> None:
        """Compute tiles, while messages are in flight."""
        compute = self.compute_tile
        with span("compute", self.step_label):
            for tile in tiles:
                if self.program.queries_walk:
                    compute(tile, self.held, self.stay, self.walk_partial, self.stay_partial)
                else:
                    compute(tile, self.stay, self.held, self.stay_partial, self.walk_partial)
                if self.comm.needs_polls:
                    for messages in self.in_flight:
                        messages.poll()

    def finish(self) -> tuple[PassOutput, PassOutput]:
        """The results of the side that stays and of walkers, when owners have all partial ones."""
        if self.walk_accumulators.shapes:
            last = self._messages("reduce")
            self._move_partials(last, self.program.steps[-1], None)
            last.post().wait()
        stay = self.program.stay
        if stay.own_in_shard:
            own_results = tuple([pack(x, stay.own_in_buffer) for x in self.stay_partial])
            self.stay_total.add(stay.own_in_shard, own_results)
        for messages in list(self.in_flight):  # results, and rows passed on in the last round
            messages.wait()
        stay_results = PassOutput(self.stay_total.buffers(), self.stay)
        return stay_results, PassOutput(self.walk_total.buffers(), self.gathered)

    def _messages(self, purpose: str) -> Messages:
        return Messages(self.comm, f"{self.name} {purpose}", self.in_flight)

    def _gather(self, rows: Gather, shard: Tensors) -> Tensors:
        """The walkers of the first step; the shard itself if this rank reads no other rows."""
        messages = self._messages("gather")
        messages.send(rows.send, shard)
        if len(rows.receive) == 1 and rows.receive[0].peer == self.comm.rank:
            gathered = messages.to_self.pop(0)
        else:
            gathered = empty_rows(rows.num_rows, shard)
            messages.receive(rows.receive, gathered)
        messages.post().wait()
        return gathered

    def _fetch(self, exchange: Exchange, rows: Tensors) -> Messages | None:
        """Start an exchange of rows that stay: send some of `rows`, receive other ranks' rows."""
        if not (exchange.send or exchange.receive):
            return None
        messages = self._messages("gather")
        messages.send(exchange.send, rows)
        messages.receive(exchange.receive, self.fetch_buffers)
        return messages.post()

    def _move_partials(self, messages: Messages, previous: Step | None, step: Step | None) -> None:
        """Send the previous step's partial results to the next rank of the hop, or to the owners.

        Received ones are added to the results of this step, or to the total of own rows.
        """
        leaving, dtypes = self.walk_partial, self.walk_accumulators.message_dtypes
        self.walk_partial = ()
        if step:
            self.walk_partial = self.walk_accumulators.prepare(step.num_rows, step.blank)
        if previous is None or not leaving:
            return
        messages.send((*previous.partial.send, *previous.reduce.send), leaving, dtypes)
        if step:
            add_to_partial = partial(scatter, self.walk_partial, self.walk_accumulators.combine)
            messages.collect(previous.partial.receive, leaving, add_to_partial, dtypes)
        messages.collect(previous.reduce.receive, leaving, self.walk_total.add, dtypes)

    def _return(self, exchange: Exchange, put: PutRows) -> Messages | None:
        """Send finished results towards the rows' owners; `put` takes the received ones."""
        if not (exchange.send or exchange.receive):
            return None
        messages, dtypes = self._messages("reduce"), self.stay_accumulators.message_dtypes
        messages.send(exchange.send, self.stay_partial, dtypes)
        messages.collect(exchange.receive, self.stay_partial, put, dtypes)
        return messages.post()


def _fetch_buffers(stay: Stay, shard: Tensors) -> Tensors:
    """Buffers of the rows that stay, with this rank's own; the shard if there are no others."""
    if stay.own_in_shard == ((0, stay.num_rows),) and stay.num_rows == stay.shard_rows:
        return shard
    buffers = empty_rows(stay.num_rows, shard)
    scatter(buffers, copy, stay.own_in_buffer, tuple([pack(x, stay.own_in_shard) for x in shard]))
    return buffers
