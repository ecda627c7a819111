"""Heads for tokens: the all-to-all around any route (DeepSpeed-Ulysses, arXiv 2309.14509).

A group of u ranks (lowering/ulysses_groups.py) gathers its rows; every member then computes some of
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

from wf_backends.comm import NO_PASS, Communicator, Pass
from wf_backends.lowering import Parcels, parcels
from wf_backends.runtime.autograd import move
from wf_backends.runtime.messages import Messages, add, copy, scatter
from wf_backends.schedule import Range, Ranges, join, locate, size


@dataclass(frozen=True, slots=True)
class HeadExchange:
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

    def rows_of(self, member: int) -> Parcels:
        """The same of a member's shard, as slices of the group's buffer."""
        return parcels(member, self.rows[member], ((0, self.num_rows),))

    def blank(self, me: int, like: Tensor) -> Tensor:
        """(b, s, h, d): room for all heads of my rows, to be written or, of copies, added to."""
        shape = (size(self.rows[me]), len(like), self.num_heads, *like.shape[3:])
        if self.copies == 1:
            return like.new_empty(shape).transpose(0, 1)
        wide = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(shape, dtype=wide).transpose(0, 1)

    def split(self, chunks: int) -> tuple[HeadExchange, ...]:
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


def make_head_exchange(shards: Sequence[Ranges], num_heads: int, query_heads: int) -> HeadExchange:
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
    return HeadExchange(num_heads, heads, tuple(locate(shard, buffer) for shard in shards))


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """The ranks that exchange heads for tokens, and what they exchange, chunk by chunk of heads."""

    comm: Communicator
    queries: tuple[HeadExchange, ...]
    keys: tuple[HeadExchange, ...]

    def heads(self, chunk: int) -> Range:
        """This rank's query heads, of all of the model's."""
        return self.queries[chunk].heads[self.comm.rank]

    def qkv(self, chunk: int) -> tuple[HeadExchange, ...]:
        """The exchanges of q, k and v."""
        return self.queries[chunk], self.keys[chunk], self.keys[chunk]

    def out(self, chunk: int) -> tuple[HeadExchange, ...]:
        """The exchange of out."""
        return (self.queries[chunk],)


def heads_for_tokens(x: Tensor, exchange: HeadExchange, comm: Communicator, label: str) -> Tensor:
    """All heads of my rows (b, s, h, d) -> my heads of the group's rows (b, n, h', d)."""
    there = partial(_exchange, gather_rows, exchange, comm, NO_PASS)
    back = partial(_exchange, bring_back, exchange, comm, NO_PASS.backward())
    return move(x, there, back, label) if comm.size > 1 else x


def tokens_for_heads(x: Tensor, exchange: HeadExchange, comm: Communicator, label: str) -> Tensor:
    """My heads of the group's rows (b, n, h', d) -> all heads of my rows (b, s, h, d)."""
    there = partial(_exchange, bring_back, exchange, comm, NO_PASS)
    back = partial(_exchange, gather_rows, exchange, comm, NO_PASS.backward())
    return move(x, there, back, label) if comm.size > 1 else x


def _exchange(
    register: Callable[[Messages, HeadExchange, Tensor], Tensor],
    exchange: HeadExchange,
    comm: Communicator,
    now: Pass,
    x: Tensor,
    label: str,
) -> Tensor:
    """What the messages bring that `gather_rows` or `bring_back` registers, in x's dtype."""
    comm.enter(now)
    messages = Messages(comm, label)
    found = register(messages, exchange, x)
    messages.post().wait()
    return found.to(x.dtype)


def gather_rows(messages: Messages, exchange: HeadExchange, x: Tensor) -> Tensor:
    """Register x's heads for the members, and theirs for me: (b, s, h, d) -> (b, n, h', d)."""
    rows, me = x.transpose(0, 1), messages.comm.rank
    buffer = x.new_empty((exchange.num_rows, len(x), exchange.share, *x.shape[3:]))
    for member, heads in enumerate(exchange.heads):
        for parcel in exchange.own(me, member):
            messages.send(parcel, (rows[:, :, slice(*heads)],))
        for parcel in exchange.rows_of(member):
            messages.receive(parcel, (buffer,))
    return buffer.transpose(0, 1)


def bring_back(
    messages: Messages, exchange: HeadExchange, x: Tensor, into: Tensor | None = None
) -> Tensor:
    """The transpose of `gather_rows`: (b, n, h', d) -> (b, s, h, d).

    What several members hold of one head is summed in float32 or wider.

    Args:
        into: (b, s, h, d), where other heads than these are already; None = a new tensor.
    """
    buffer, me = x.transpose(0, 1), messages.comm.rank
    total = (exchange.blank(me, x) if into is None else into).transpose(0, 1)
    combine = copy if exchange.copies == 1 else add
    for member, heads in enumerate(exchange.heads):
        for parcel in exchange.rows_of(member):
            messages.send(parcel, (buffer,))
        place = partial(scatter, (total[:, :, slice(*heads)],), combine)
        for parcel in exchange.own(me, member):
            messages.collect(parcel, (buffer,), place)
    return total.transpose(0, 1)
