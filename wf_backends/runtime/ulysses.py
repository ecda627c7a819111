"""Heads for tokens: the all-to-all around any route (DeepSpeed-Ulysses, arXiv 2309.14509).

A group of u ranks (lowering/ulysses_groups.py) pools its rows; every member then computes some of
the heads. Where u exceeds the number of key heads, several members get the same key head and the
gradients of these copies are summed.

Shapes: s rows of this rank, n rows of the group (in sequence order), b batch, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from wf_backends.comm import Communicator, move_all
from wf_backends.lowering import Parcels, parcels
from wf_backends.runtime.messages import Mail, Tensors, add, copy, scatter
from wf_backends.schedule import Range, Ranges, join, locate, size


@dataclass(frozen=True, slots=True)
class Exchange:
    """Which heads every member gets, and where its rows lie in the group's buffer."""

    num_heads: int
    heads: tuple[Range, ...]
    rows: tuple[Ranges, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the group's buffer."""
        return sum(map(size, self.rows))

    @property
    def share(self) -> int:
        """Heads that every member gets."""
        return size(self.heads[:1])

    @property
    def copies(self) -> int:
        """How many members hold each head."""
        return max(1, size(self.heads) // self.num_heads)

    def own(self, me: int, member: int) -> Parcels:
        """Slices of my shard that go to a member, and that it sends back: a message each."""
        return parcels(member, self.rows[me], self.rows[me])

    def pooled(self, member: int) -> Parcels:
        """The same of a member's shard, as slices of the group's buffer."""
        return parcels(member, self.rows[member], ((0, self.num_rows),))

    def split(self, chunks: int) -> tuple[Exchange, ...]:
        """As many exchanges, each of an equal part of every member's heads, in order.

        Raises:
            ValueError: if the heads of a member are not a multiple of `chunks`.
        """
        if chunks == 1:
            return (self,)
        each, rest = divmod(self.share, chunks)
        if rest:  # as of the one key head that several members have
            raise ValueError(
                f"ulysses_chunks must divide what a rank has of the {self.num_heads} heads (query "
                f"or key heads) after the exchange, {self.share}, got {chunks}"
            )
        starts = [[first + at * each for first, _ in self.heads] for at in range(chunks)]
        return tuple(replace(self, heads=tuple((s, s + each) for s in own)) for own in starts)


def make_exchange(shards: Sequence[Ranges], num_heads: int, query_heads: int) -> Exchange:
    """The exchange of a group whose members own `shards`.

    Args:
        num_heads: heads of the tensor at hand: query heads, or key heads.
        query_heads: query heads, of which every member gets the same number.

    Raises:
        ValueError: if the group's size does not divide the query heads, or neither divides the
            key heads nor is a multiple of them.
    """
    degree, group = len(shards), query_heads // num_heads
    if query_heads % degree:
        raise ValueError(f"ulysses_degree {degree} must divide the {query_heads} attention heads")
    if num_heads % degree and degree % num_heads:
        raise ValueError(
            f"ulysses_degree {degree} must divide the {num_heads} key heads, or be a multiple of "
            "them, so that the query heads of a rank share whole key heads"
        )
    share = query_heads // degree
    firsts = range(0, query_heads, share)
    heads = tuple((at // group, (at + share - 1) // group + 1) for at in firsts)
    buffer = join(piece for shard in shards for piece in shard)
    return Exchange(num_heads, heads, tuple(locate(shard, buffer) for shard in shards))


def heads_for_tokens(
    xs: Tensors, exchanges: Sequence[Exchange], comm: Communicator, label: str
) -> Tensors:
    """All heads of my rows (b, s, h, d) -> my heads of the group's rows (b, n, h', d).

    Args:
        xs: tensors that travel together, forward and backward. exchanges: one for each.
    """
    there, back = (partial(_trade, way, exchanges, comm) for way in (pool_rows, bring_back))
    return xs if comm.size == 1 else move_all(xs, there, back, label)


def tokens_for_heads(
    xs: Tensors, exchanges: Sequence[Exchange], comm: Communicator, label: str
) -> Tensors:
    """My heads of the group's rows (b, n, h', d) -> all heads of my rows (b, s, h, d)."""
    there, back = (partial(_trade, way, exchanges, comm) for way in (bring_back, pool_rows))
    return xs if comm.size == 1 else move_all(xs, there, back, label)


Place = Callable[[int], None]  # puts what a member sent where it belongs
Register = Callable[[Mail, Exchange, Tensor], tuple[Place, Callable[[], Tensor]]]


class Trade:
    """One exchange of several tensors, in one mail.

    Args:
        registers: `pool_rows` or `bring_back`, one for each tensor, like the exchanges.
    """

    def __init__(
        self,
        registers: Sequence[Register],
        exchanges: Sequence[Exchange],
        comm: Communicator,
        xs: Tensors,
        label: str,
    ) -> None:
        self._mail, self._posted = Mail(comm, label), False
        self._sides = [
            register(self._mail, exchange, x)
            for register, exchange, x in zip(registers, exchanges, xs, strict=True)
        ]

    def post(self) -> Trade:
        """Start all of it, for what is computed meanwhile to hide."""
        self._posted = self._mail.post()
        return self

    def finish(self) -> Tensors:
        """What has come. What was not posted goes in turns: the first is placed while the rest is
        on its way."""
        if self._posted:
            self._mail.wait()
        for member in range(self._mail.comm.size) if self._posted else self._mail.arrivals():
            for place, _ in self._sides:
                place(member)
        return tuple(finish() for _, finish in self._sides)


def _trade(
    register: Register, exchanges: Sequence[Exchange], comm: Communicator, xs: Tensors, label: str
) -> Tensors:
    return Trade([register] * len(xs), exchanges, comm, xs, label).finish()


def pool_rows(mail: Mail, exchange: Exchange, x: Tensor) -> tuple[Place, Callable[[], Tensor]]:
    """Register x's heads for the members, and theirs for me, which land where they belong."""
    rows, me = x.transpose(0, 1), mail.comm.rank
    for member, heads in enumerate(exchange.heads):
        for parcel in exchange.own(me, member):
            mail.send(parcel, (rows[:, :, slice(*heads)],))
    buffer = x.new_empty((exchange.num_rows, len(x), exchange.share, *x.shape[3:]))
    landing = [
        [mail.land(parcel, (buffer,)) for parcel in exchange.pooled(member)]
        for member in range(mail.comm.size)
    ]

    def place(member: int) -> None:
        for land in landing[member]:
            land()

    return place, lambda: buffer.transpose(0, 1)


def bring_back(
    mail: Mail, exchange: Exchange, x: Tensor, into: Tensor | None = None
) -> tuple[Place, Callable[[], Tensor]]:
    """The transpose of `pool_rows`: what several members hold of one head is summed in float32.

    Args:
        into: (s, b, h, d), where other heads than these are already; None = a new tensor.
    """
    buffer, me = x.transpose(0, 1), mail.comm.rank
    members = range(mail.comm.size)
    for member in members:
        for parcel in exchange.pooled(member):
            mail.send(parcel, (buffer,))
    arriving = [
        [(parcel.rows, mail.receive(parcel, (buffer,))) for parcel in exchange.own(me, member)]
        for member in members
    ]
    shape = (size(exchange.rows[me]), buffer.shape[1], exchange.num_heads, *buffer.shape[3:])
    alone = exchange.copies == 1
    dtype = x.dtype if alone else torch.promote_types(x.dtype, torch.float32)
    blank = buffer.new_empty if alone else buffer.new_zeros
    total = blank(shape, dtype=dtype) if into is None else into

    def place(member: int) -> None:
        heads = total[:, :, slice(*exchange.heads[member])]
        for rows, values in arriving[member]:
            scatter((heads,), rows, values, copy if alone else add)

    return place, lambda: total.to(x.dtype).transpose(0, 1)
