"""Heads for tokens: the all-to-all around any route (DeepSpeed-Ulysses, arXiv 2309.14509).

A group of u consecutive ranks pools its rows; every member then computes some of the heads.
Where u exceeds the number of key heads, several members get the same key head and the gradients
of these copies are summed.

Shapes: s rows of this rank, n rows of the group (in sequence order), b batch, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wf_backends.adjoint import move
from wf_backends.comm.protocol import Communicator
from wf_backends.layout import Layout
from wf_backends.mail import Mail, add, copy, scatter
from wf_backends.ranges import Range, Ranges, join, locate, size
from wf_backends.rankplan import Parcel


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
        return size(self.heads) // self.num_heads


def make_exchange(shards: Layout, num_heads: int, query_heads: int) -> Exchange:
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


def heads_for_tokens(x: Tensor, exchange: Exchange, comm: Communicator, label: str) -> Tensor:
    """All heads of my rows (b, s, h, d) -> my heads of the group's rows (b, n, h', d)."""
    there, back = partial(_pool, exchange, comm), partial(_return, exchange, comm)
    return x if comm.size == 1 else move(x, there, back, label)


def tokens_for_heads(x: Tensor, exchange: Exchange, comm: Communicator, label: str) -> Tensor:
    """My heads of the group's rows (b, n, h', d) -> all heads of my rows (b, s, h, d)."""
    there, back = partial(_return, exchange, comm), partial(_pool, exchange, comm)
    return x if comm.size == 1 else move(x, there, back, label)


def _pool(exchange: Exchange, comm: Communicator, x: Tensor, label: str) -> Tensor:
    rows = x.transpose(0, 1)
    own = ((0, len(rows)),)
    mail = Mail(comm, label)
    for member, heads in enumerate(exchange.heads):
        mail.send(Parcel(member, own), (rows[:, :, slice(*heads)],))
    mine = rows[:, :, slice(*exchange.heads[comm.rank])]
    places = [Parcel(member, at) for member, at in enumerate(exchange.rows)]
    arriving = [mail.receive(place, (mine,)) for place in places]
    mail.deliver()
    buffer = mine.new_empty((exchange.num_rows, *mine.shape[1:]))
    for place, values in zip(places, arriving, strict=True):
        scatter((buffer,), place.rows, values, copy)
    return buffer.transpose(0, 1)


def _return(exchange: Exchange, comm: Communicator, x: Tensor, label: str) -> Tensor:
    """The transpose of `_pool`: what several members hold of one head is summed in float32."""
    buffer = x.transpose(0, 1)
    own = ((0, size(exchange.rows[comm.rank])),)
    mail = Mail(comm, label)
    for member, at in enumerate(exchange.rows):
        mail.send(Parcel(member, at), (buffer,))
    arriving = [mail.receive(Parcel(member, own), (buffer,)) for member in range(comm.size)]
    mail.deliver()
    shape = (size(own), buffer.shape[1], exchange.num_heads, *buffer.shape[3:])
    dtype = x.dtype if exchange.copies == 1 else torch.promote_types(x.dtype, torch.float32)
    total = buffer.new_zeros(shape, dtype=dtype)
    for heads, values in zip(exchange.heads, arriving, strict=True):
        add((total[:, :, slice(*heads)],), values)
    return total.to(x.dtype).transpose(0, 1)
