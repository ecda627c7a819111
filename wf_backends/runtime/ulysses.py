"""Heads for tokens: the all-to-all around any route (DeepSpeed-Ulysses, arXiv 2309.14509).

A group of u ranks (lowering/ulysses_groups.py) exchanges heads for rows: every member gets all rows
of the group, of some of the heads. Where u exceeds the number of key heads, several members get the
same key head, and the gradients of these copies are summed. Attention may compute a rank's heads in
chunks, one after the other. By default all heads are one chunk.

Shapes: s rows of this rank, n rows of the group (in sequence order), b batch, h heads, h' heads of
one member, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from wf_backends.comm import Communicator
from wf_backends.lowering import Parcels, parcels
from wf_backends.runtime.messages import Messages, Tensors, add, copy, scatter
from wf_backends.schedule import Range, Ranges, join, locate, size

ComputeChunk = Callable[[int, Tensors], Tensors]
"""(chunk, its heads of the group's rows) -> the results for these heads and rows."""


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """An exchange of one tensor's heads for tokens; members are ranks inside the group."""

    num_heads: int  # of the whole tensor
    heads: tuple[Range, ...]  # by member: the heads that it gets
    rows: tuple[Ranges, ...]  # by member: where its shard lies in the group's buffer

    @property
    def num_rows(self) -> int:
        """Rows of the group's buffer."""
        return sum(map(size, self.rows))

    @property
    def heads_per_member(self) -> int:
        """Heads that every member gets."""
        return size(self.heads[:1])

    @property
    def copies(self) -> int:
        """How many members get each head."""
        return max(1, size(self.heads) // self.num_heads)

    def shard_parcels(self, me: int, member: int) -> Parcels:
        """This rank's shard, as slices of the shard: sent to a member, or returned by it."""
        return parcels(member, self.rows[me], self.rows[me])

    def buffer_parcels(self, member: int) -> Parcels:
        """A member's shard, as slices of the group's buffer."""
        return parcels(member, self.rows[member], ((0, self.num_rows),))

    def empty_total(self, me: int, x: Tensor) -> Tensor:
        """(b, s, h, d), to be filled by members' x; to sum copies, zeros in float32 or wider."""
        shape = (size(self.rows[me]), len(x), self.num_heads, *x.shape[3:])
        if self.copies == 1:
            return x.new_empty(shape).transpose(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.new_zeros(shape, dtype=wide).transpose(0, 1)

    def split(self, chunks: int) -> tuple[HeadExchange, ...]:
        """The exchanges of `chunks` equal parts of every member's heads, in order.

        Raises:
            ValueError: if the heads of a member are not a multiple of `chunks`.
        """
        num_heads, rest = divmod(self.heads_per_member, chunks)
        if rest:  # as of one key head that several members get
            raise ValueError(
                f"ulysses_chunks must divide what a rank has of the {self.num_heads} heads (query "
                f"or key heads) after the exchange, {self.heads_per_member}, got {chunks}"
            )
        exchanges: list[HeadExchange] = []
        for chunk in range(chunks):
            starts = [first + chunk * num_heads for first, _ in self.heads]
            heads = tuple((start, start + num_heads) for start in starts)
            exchanges.append(replace(self, heads=heads))
        return tuple(exchanges)


def make_head_exchange(shards: Sequence[Ranges], num_heads: int, query_heads: int) -> HeadExchange:
    """The exchange of a group whose members own `shards`.

    Args:
        shards: by member, the positions that it owns.
        num_heads: heads of the tensor that is exchanged: the query heads or the key heads.
        query_heads: query heads, of which every member gets the same number.

    Raises:
        ValueError: if the group's size does not divide the query heads, or neither divides the
            key heads nor is a multiple of them.
    """
    degree, group_size = len(shards), query_heads // num_heads
    if query_heads % degree:
        raise ValueError(f"ulysses_degree {degree} must divide the {query_heads} attention heads")
    if num_heads % degree and degree % num_heads:
        raise ValueError(
            f"ulysses_degree {degree} must divide the {num_heads} key heads, or be a multiple of "
            "them, so that the query heads of a rank share whole key heads"
        )
    share = query_heads // degree
    starts = range(0, query_heads, share)  # of each member's query heads
    heads = tuple((start // group_size, (start + share - 1) // group_size + 1) for start in starts)
    buffer = join(piece for shard in shards for piece in shard)
    return HeadExchange(num_heads, heads, tuple(locate(shard, buffer) for shard in shards))


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """The ranks that exchange heads for tokens, and their exchanges, by chunk of the heads."""

    comm: Communicator
    queries: tuple[HeadExchange, ...]
    keys: tuple[HeadExchange, ...]

    def heads(self, chunk: int) -> Range:
        """The query heads of a chunk that this rank gets."""
        return self.queries[chunk].heads[self.comm.rank]

    def exchanges(self, name: str, chunk: int) -> tuple[HeadExchange, ...]:
        """The exchanges of q, k and v, or of out: `name` is "qkv" or "out"."""
        queries, keys = self.queries[chunk], self.keys[chunk]
        return (queries, keys, keys) if name == "qkv" else (queries,)


def gather_rows(messages: Messages, exchange: HeadExchange, x: Tensor) -> Tensor:
    """Add the messages of x (b, s, h, d) -> (b, n, h', d), the tensor that they fill."""
    rows, me = x.transpose(0, 1), messages.comm.rank
    buffer = x.new_empty((exchange.num_rows, len(x), exchange.heads_per_member, *x.shape[3:]))
    for member, heads in enumerate(exchange.heads):
        messages.send(exchange.shard_parcels(me, member), (rows[:, :, slice(*heads)],))
        messages.receive(exchange.buffer_parcels(member), (buffer,))
    return buffer.transpose(0, 1)


def return_rows(messages: Messages, exchange: HeadExchange, x: Tensor, total: Tensor) -> None:
    """Add the messages of the transpose of `gather_rows`: (b, n, h', d) -> (b, s, h, d).

    Args:
        total: `empty_total` of the exchange, which they fill; it may hold other heads already.
    """
    buffer, rows, me = x.transpose(0, 1), total.transpose(0, 1), messages.comm.rank
    combine = copy if exchange.copies == 1 else add
    for member, heads in enumerate(exchange.heads):
        messages.send(exchange.buffer_parcels(member), (buffer,))
        put = partial(scatter, (rows[:, :, slice(*heads)],), combine)
        messages.collect(exchange.shard_parcels(me, member), (buffer,), put)


def run_chunks(group: HeadGroup, xs: Tensors, pass_name: str, compute: ComputeChunk) -> Tensors:
    """The results of `compute` for all chunks of the heads, of this rank's rows and all heads.

    While a chunk is computed, the next chunk's inputs and the previous chunk's results are
    exchanged: only the first exchange of inputs and the last exchange of results are not
    overlapped.

    Args:
        xs: the inputs, of this rank's rows and all heads: q, k and v, or in the backward dout.
        pass_name: "forward" or "backward", in labels of messages.
    """
    inputs_name, results_name = ("qkv", "out") if pass_name == "forward" else ("out", "qkv")
    label = f"{pass_name} ulysses {results_name}"
    totals: Tensors = ()
    results = Messages(group.comm, label)
    next_inputs = _gather(group, pass_name, inputs_name, 0, xs)
    for chunk in range(len(group.queries)):
        inputs, chunk_xs = next_inputs
        inputs.wait()
        if chunk + 1 < len(group.queries):
            next_inputs = _gather(group, pass_name, inputs_name, chunk + 1, xs)
        ys, exchanges = compute(chunk, chunk_xs), group.exchanges(results_name, chunk)
        if not totals:
            pairs = zip(exchanges, ys, strict=True)
            totals = tuple(exchange.empty_total(group.comm.rank, y) for exchange, y in pairs)
        results.wait()
        results = Messages(group.comm, label)
        for exchange, y, total in zip(exchanges, ys, totals, strict=True):
            return_rows(results, exchange, y, total)
        results.post()
    results.wait()
    return totals


def _gather(
    group: HeadGroup, pass_name: str, name: str, chunk: int, xs: Tensors
) -> tuple[Messages, Tensors]:
    """Start the messages that gather a chunk's heads of xs; and the tensors that they fill."""
    messages = Messages(group.comm, f"{pass_name} ulysses {name}")
    pairs = zip(group.exchanges(name, chunk), xs, strict=True)
    gathered = tuple(gather_rows(messages, exchange, x) for exchange, x in pairs)
    return messages.post(), gathered
