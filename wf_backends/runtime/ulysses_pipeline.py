"""Attention between Ulysses exchanges, chunk by chunk of a rank's heads.

While one chunk is computed, the next is on its way here and what the last one gave is on its way
home, so that of all exchanges (runtime/ulysses.py) only the first one in and the last one out hide
behind nothing. By default all heads are one chunk.

Shapes: s rows of this rank, n rows of its group, b batch, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wf_backends.runtime.attention import Call, attend, differentiate
from wf_backends.runtime.autograd import below_autograd, first_order_only
from wf_backends.runtime.learned import Learned
from wf_backends.runtime.messages import Messages, Tensors
from wf_backends.runtime.ulysses import HeadExchange, HeadGroup, bring_back, gather_rows

Exchanges = Callable[[int], tuple[HeadExchange, ...]]  # of a chunk, one for each tensor


class UlyssesAttention(torch.autograd.Function):
    """attention(q, k, v, call, group, *learned) of this rank's rows, all heads.

    q (b, s, h, d), k (b, s, g, d), v (b, s, g, e); the call and what is learned are of all heads,
    too. Of the gradient of what is learned this is the part of the rows and heads that this rank
    computes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        group: HeadGroup,
        *learned: Tensor | None,
    ) -> Tensor:
        parameters = Learned(*learned)
        held: list[Tensor] = []

        def compute(chunk: int, here: Tensors) -> Tensors:
            q, k, v = here
            heads = group.heads(chunk)
            with below_autograd():
                out, *more = attend(q, k, v, call.of_heads(heads), parameters.of_heads(heads))
            held.extend((*here, out, *more))
            return (out,)

        labels = "forward ulysses qkv", "forward ulysses out"
        (out,) = _through(group, (q, k, v), group.qkv, group.out, labels, compute)
        ctx.call, ctx.group, ctx.num_learned = call, group, len(learned)
        ctx.save_for_backward(*learned, *held)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        group: HeadGroup = ctx.group
        group.comm.enter(call.now.backward())
        everything = ctx.saved_tensors  # read once: checkpointing gives it only once
        given, saved = everything[: ctx.num_learned], everything[ctx.num_learned :]
        learned = Learned(*given)
        each = len(saved) // len(group.queries)
        totals = [None if x is None else torch.zeros_like(x) for x in given]

        def compute(chunk: int, here: Tensors) -> Tensors:
            held, heads = saved[chunk * each : (chunk + 1) * each], group.heads(chunk)
            of_these = learned.of_heads(heads)
            with below_autograd():
                *grads, parts = differentiate(held, here[0], call.of_heads(heads), of_these)
            for total, part in zip(totals, parts, strict=False):
                if total is not None and part is not None:
                    total[slice(*heads)] = part
            return tuple(grads)

        labels = "backward ulysses out", "backward ulysses qkv"
        grads = _through(group, (dout,), group.out, group.qkv, labels, compute)
        return (*grads, None, None, *totals)


def _through(
    group: HeadGroup,
    xs: Tensors,
    come: Exchanges,
    leave: Exchanges,
    labels: tuple[str, str],
    compute: Callable[[int, Tensors], Tensors],
) -> Tensors:
    """What `compute` makes of every chunk of the group's rows, brought back to this rank's.

    Args:
        xs: this rank's rows, all heads. come, leave: the exchanges of what is computed with, and
            of what comes of it. labels: of their messages. compute: called with the chunk's number
            and its heads of the group's rows.
    """
    totals: Tensors = ()
    coming, going = Messages(group.comm, labels[0]), Messages(group.comm, labels[1])
    arriving = _arrive(coming, come(0), xs)
    coming.post()
    last = len(group.queries) - 1
    for chunk in range(last + 1):
        coming.wait()
        here = arriving
        if chunk < last:
            coming = Messages(group.comm, labels[0])
            arriving = _arrive(coming, come(chunk + 1), xs)
            coming.post()
        found, exchanges = compute(chunk, here), leave(chunk)
        me = group.comm.rank
        totals = totals or tuple(one.blank(me, x) for one, x in zip(exchanges, found, strict=True))
        going.wait()
        going = Messages(group.comm, labels[1])
        for one, x, total in zip(exchanges, found, totals, strict=True):
            bring_back(going, one, x, total)
        going.post()
    going.wait()
    return totals


def _arrive(messages: Messages, exchanges: tuple[HeadExchange, ...], xs: Tensors) -> Tensors:
    """Register the heads of a chunk."""
    return tuple(gather_rows(messages, one, x) for one, x in zip(exchanges, xs, strict=True))
