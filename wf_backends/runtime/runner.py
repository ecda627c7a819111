"""One pass of a plan: its messages, with the tiles computed while they travel.

Buffers are rows-first, as in the executor. Every message is posted as soon as what it carries is
there, and waited for when what it brings is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wf_backends.comm import Communicator
from wf_backends.lowering import (
    Exchange,
    Parcel,
    Parcels,
    RankProgram,
    Round,
    Stay,
    Step,
    Tile,
    met,
)
from wf_backends.runtime.messages import (
    Combine,
    Home,
    Mail,
    Tensors,
    bring_together,
    copy,
    pack,
    scatter,
    span,
)
from wf_backends.schedule import Ranges, intersect, join, size, union


@dataclass(frozen=True, slots=True)
class Accumulators:
    """What one side collects: tensors like `like` beyond the rows, each from its own start."""

    like: tuple[Tensor, ...]
    starts: tuple[float, ...]
    dtype: torch.dtype
    combine: Combine
    """Folds partial results of the same rows into the first."""

    def blank(self, num_rows: int) -> Tensors:
        """Buffers of rows to which nothing was added yet."""
        return self.prepare(num_rows, ((0, num_rows),))

    def prepare(self, num_rows: int, blank: Ranges) -> Tensors:
        """Buffers whose rows in `blank` are ready to be added to; the others will be written."""
        buffers = tuple(x.new_empty((num_rows, *x.shape[1:]), dtype=self.dtype) for x in self.like)
        for buffer, start in zip(buffers, self.starts, strict=True):
            for rows in blank:
                buffer[slice(*rows)] = start
        return buffers


class Work(Protocol):
    """What a pass computes. Sides are tuples of rows-first tensors, partials likewise."""

    stay: Accumulators
    walk: Accumulators

    def compute(
        self, tile: Tile, stay: Tensors, held: Tensors, partial: Tensors, moving: Tensors
    ) -> None: ...


class Pass:
    """One pass of a plan on one rank.

    Args:
        name: of the pass, in labels of messages, spans and errors.
        stay, walk: this rank's shard of the side that stays and of the side that walks.
        kept: the first tensors of (stay, walk), already gathered; they are not gathered again.
    """

    def __init__(
        self,
        plan: RankProgram,
        comm: Communicator,
        name: str,
        stay: Tensors,
        walk: Tensors,
        work: Work,
        kept: tuple[Tensors, Tensors] = ((), ()),
    ) -> None:
        self.plan, self.comm, self.name, self.work = plan, comm, name, work
        self.shard = stay[len(kept[0]) :]
        self.walkers = tuple(pack(x, plan.part) for x in walk)
        self.room = _room(plan.stay, self.shard)
        self.stay, self.held = (*kept[0], *self.room), kept[1]
        self.partial = work.stay.prepare(plan.stay.num_rows, plan.blank)
        self.home = Home(plan.walk.shard_rows, work.walk.blank, work.walk.combine)
        self.walking: Tensors = ()
        self.arriving: Tensors = ()
        self.moving: Tensors = ()
        self.flying: list[Mail] = []
        self.returning: list[tuple[Mail, Parcel, Tensors]] = []

    def start(self) -> None:
        """Bring the walkers together and ask for what stays."""
        mail = Mail(self.comm, f"{self.name} gather")
        finish = bring_together(mail, self.plan.walk, self.walkers[len(self.held) :])
        self._post(mail)
        self._wait(mail)
        self.gathered = self.walking = (*self.held, *finish())
        self.fetched = [self._fetch(one.fetch) for one in self.plan.steps[0].rounds]

    def begin(self, index: int) -> None:
        """Hand on what is held, give what others read next, and ask for what comes next."""
        step = self.plan.steps[index]
        if index:
            self.walking = self.arriving if step.num_rows else ()
            self.arriving = () if step.num_rows else self.arriving
        self.mail = Mail(self.comm, f"{self.name} step {index}")
        for parcel in step.hand:
            self.mail.send(parcel, self.walking)
        self.taking = self._fill(self.mail, step, step.take)
        self.land = self._part(self.mail, index - 1, step)
        self._give(step, met(step, self.plan.steps[index - 1] if index else None))
        self.moving = self.work.walk.prepare(step.num_rows, step.blank)

    def compute(self, index: int) -> None:
        """The tiles of a step, round by round; what is finished leaves."""
        for at, one in enumerate(self.plan.steps[index].rounds):
            if index == 0:
                self._place(self.fetched[at])
            with span(f"compute {self.name} step {index}"):
                self._compute(one, self.walking)
            self._return(one.home)

    def end(self) -> None:
        """Wait until what comes next is there."""
        self._wait(self.mail)
        if self.gets:
            self._wait(self.given)
        self.land(self.moving)
        for land in self.taking:
            land()

    def finish(self) -> tuple[Tensors, Tensors]:
        """The finished results of this rank's rows of either side."""
        mail = Mail(self.comm, f"{self.name} home")
        land = self._part(mail, len(self.plan.steps) - 1, None)
        self._post(mail)
        self._wait(mail)
        land(())
        return self._collect(), self.home.total()

    def _compute(self, one: Round, held: Tensors) -> None:
        for tile in one.tiles:  # hides what the mail carries
            self.work.compute(tile, self.stay, held, self.partial, self.moving)
            for mail in self.flying:
                mail.poll()

    def _give(self, step: Step, hop: set[int]) -> None:
        """Post the hop; send own rows to whoever reads them next, and ask for what this rank does.

        Who only gives does not wait for it, unless it goes to a peer of the hop.
        """
        self.given = Mail(self.comm, self.mail.label)
        hop.add(self.comm.rank)
        for parcel in step.give:
            mail = self.mail if parcel.peer in hop else self.given
            mail.send(parcel, self.walkers)
        for parcel in step.get:
            mail = self.mail if parcel.peer in hop else self.given
            self.taking += self._fill(mail, step, (parcel,))
        self.gets = any(parcel.peer not in hop for parcel in step.get)
        self._post(self.mail)
        self._post(self.given)

    def _fill(self, mail: Mail, step: Step, parcels: Parcels) -> list[Callable[[], None]]:
        """Ask for rows of the buffer that fills; call what is returned after the wait."""
        if parcels and not self.arriving:
            like = self.walkers
            self.arriving = tuple(x.new_empty((step.more, *x.shape[1:])) for x in like)
        return [mail.land(parcel, self.arriving) for parcel in parcels]

    def _fetch(self, exchange: Exchange) -> Fetched:
        """Ask for the rows of another owner, and give it this rank's own."""
        mail = Mail(self.comm, f"{self.name} gather")
        for parcel in exchange.send:
            mail.send(parcel, self.shard)
        landing = [mail.land(parcel, self.room) for parcel in exchange.receive]
        self._post(mail)
        return mail, landing

    def _place(self, fetched: Fetched) -> None:
        """Wait until fetched rows are where they belong in the buffer."""
        mail, landing = fetched
        self._wait(mail)
        for land in landing:
            land()

    def _return(self, exchange: Exchange) -> None:
        """Send home the finished results of another owner's rows; those of one's own come back."""
        if exchange == Exchange():
            return
        mail = Mail(self.comm, f"{self.name} home")
        for parcel in exchange.send:
            mail.send(parcel, self.partial)
        self.returning += [(mail, p, mail.receive(p, self.partial)) for p in exchange.receive]
        self._post(mail)

    def _part(self, mail: Mail, last: int, step: Step | None) -> Callable[[Tensors], None]:
        """Part with the partial results of the last step: on to the next rank, or home.

        The result adds what the others sent: to this step's own partial results, or to home.
        """
        moving = self.moving
        if last < 0 or not moving:
            return lambda _: None
        before = self.plan.steps[last]
        mail.send(before.partial_out, moving)
        onward = step.partial_in if step else None
        incoming = mail.receive(onward, moving)
        for parcel in before.home_out:
            mail.send(parcel, moving)
        returned = [(parcel, mail.receive(parcel, moving)) for parcel in before.home_in]
        returned.sort(key=lambda item: item[0].peer != self.comm.rank)  # as in send_home

        def land(mine: Tensors) -> None:
            if onward is not None:
                scatter(mine, onward.rows, incoming, self.work.walk.combine)
            for parcel, values in returned:
                self.home.add(parcel, values)

        return land

    def _collect(self) -> Tensors:
        """This rank's own results of the side that stays, with what came home."""
        stay, collected = self.plan.stay, self.work.stay
        home = Home(stay.shard_rows, collected.blank, collected.combine)
        if stay.mine:
            mine = tuple(pack(buffer, stay.at) for buffer in self.partial)
            home.add(Parcel(self.comm.rank, stay.mine), mine)
        for mail, parcel, values in self.returning:
            self._wait(mail)
            home.add(parcel, values)
        for mail in self.flying:  # those that only sent
            mail.wait()
        return home.total()

    def _post(self, mail: Mail) -> None:
        if mail.post():
            self.flying.append(mail)

    def _wait(self, mail: Mail) -> None:
        if mail in self.flying:
            mail.wait()
            self.flying.remove(mail)


def run(passes: Sequence[Pass]) -> tuple[Tensors, Tensors]:
    """The finished results of this rank's rows of either side, of passes that share the work.

    They go step by step together, so that all their messages are in flight while any computes.
    """
    for one in passes:
        one.start()
    for index in sorted({step for one in passes for step in one.plan.busy}):
        for one in passes:
            one.begin(index)
        for one in passes:
            one.compute(index)
        for one in passes:
            one.end()
    results = [one.finish() for one in passes]
    if len(results) == 1:
        return results[0]
    return _together(passes, results)


def _together(
    passes: Sequence[Pass], results: list[tuple[Tensors, Tensors]]
) -> tuple[Tensors, Tensors]:
    """One result of several: of the same rows that stay, and of some or all rows that walk."""
    work, (stay, _) = passes[0].work, results[0]
    walked: Ranges = ()
    walk = work.walk.prepare(size(join(rows for one in passes for rows in one.plan.part)), ())
    for one, (other, part) in zip(passes, results, strict=True):
        combine = work.walk.combine if intersect(walked, one.plan.part) else copy
        scatter(walk, one.plan.part, part, combine)
        walked = union(walked, one.plan.part)
        if other is not stay:
            work.stay.combine(stay, other)
    return stay, walk


Fetched = tuple[Mail, list[Callable[[], None]]]


def _room(stay: Stay, shard: Tensors) -> Tensors:
    """The buffer of the rows that stay, this rank's own in place; the shard itself if it is all."""
    if stay.mine == ((0, stay.num_rows),) and stay.num_rows == stay.shard_rows:
        return shard
    buffers = tuple(x.new_empty((stay.num_rows, *x.shape[1:])) for x in shard)
    scatter(buffers, stay.at, tuple(pack(own, stay.mine) for own in shard), copy)
    return buffers
