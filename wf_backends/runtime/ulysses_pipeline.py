"""Heads in chunks: one is traded for tokens while another is computed.

A rank's heads after the exchange (runtime/ulysses.py) are computed one chunk after another. While
one is, the next is on its way here and what the last one gave is on its way home, so that of all
exchanges only the first one in and the last one out hide behind nothing.

Shapes: s rows of this rank, n rows of its pool, b batch, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.comm import Communicator
from wf_backends.runtime.attention import Call, attend, differentiate
from wf_backends.runtime.messages import Tensors
from wf_backends.runtime.ulysses import Exchange, Trade, bring_back, pool_rows
from wf_backends.schedule import size

Trades = Sequence[Sequence[Exchange]]  # of every chunk, one for each tensor


@dataclass(frozen=True, slots=True)
class ChunkedCall:
    """A call of every chunk, and the exchanges around it."""

    call: Call
    pool: Communicator
    """Ranks that trade heads for tokens."""
    queries: tuple[Exchange, ...]
    keys: tuple[Exchange, ...]

    @property
    def out(self) -> Trades:
        return [(one,) for one in self.queries]

    @property
    def qkv(self) -> Trades:
        return [(q, k, k) for q, k in zip(self.queries, self.keys, strict=True)]


class ChunkedAttention(torch.autograd.Function):
    """attention(q, k, v) of this rank's rows, all heads; q (b, s, h, d), k and v (b, s, g, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, whole: ChunkedCall) -> Tensor:
        held: list[Tensors] = []

        def compute(here: Tensors) -> Tensors:
            q, k, v = here
            out, *more = attend(q, k, v, whole.call)
            held.append((*here, out, *more))
            return (out,)

        labels = "forward ulysses qkv", "forward ulysses out"
        (out,) = _through(whole.pool, (q, k, v), whole.qkv, whole.out, labels, compute)
        ctx.whole = whole
        ctx.save_for_backward(*(x for one in held for x in one))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        whole: ChunkedCall = ctx.whole
        saved, count = ctx.saved_tensors, len(whole.queries)
        each = len(saved) // count
        held = iter([saved[at * each : (at + 1) * each] for at in range(count)])

        def compute(here: Tensors) -> Tensors:
            (dout,) = here
            return differentiate(next(held), dout, whole.call)

        labels = "backward ulysses out", "backward ulysses qkv"
        return (*_through(whole.pool, (dout,), whole.out, whole.qkv, labels, compute), None)


def _through(
    comm: Communicator,
    xs: Tensors,
    come: Trades,
    leave: Trades,
    labels: tuple[str, str],
    compute: Callable[[Tensors], Tensors],
) -> Tensors:
    """What `compute` makes of every chunk of the pooled rows, brought back to this rank's.

    Args:
        xs: this rank's rows, all heads. come, leave: the exchanges of what is computed with, and
            of what comes of it. labels: of their messages.
    """
    totals: Tensors = ()
    coming, going = _arrive(comm, xs, come[0], labels[0]), None
    for at, exchanges in enumerate(leave, 1):
        here = coming.finish()
        if at < len(come):
            coming = _arrive(comm, xs, come[at], labels[0]).post()
        found = compute(here)
        totals = totals or tuple(map(partial(_blank, comm), exchanges, found))
        if going is not None:
            going.finish()
        registers = [partial(bring_back, into=total) for total in totals]
        going = Trade(registers, exchanges, comm, found, labels[1])
        if at < len(come):
            going.post()
    assert going is not None
    return going.finish()


def _arrive(comm: Communicator, xs: Tensors, exchanges: Sequence[Exchange], label: str) -> Trade:
    return Trade([pool_rows] * len(xs), exchanges, comm, xs, label)


def _blank(comm: Communicator, exchange: Exchange, like: Tensor) -> Tensor:
    """(s, b, h, d): room for all heads of this rank's rows."""
    b, _, _, d = like.shape
    return like.new_empty(size(exchange.rows[comm.rank]), b, exchange.num_heads, d)
