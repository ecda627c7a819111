"""Attention between Ulysses exchanges (runtime/ulysses.py), one chunk of a rank's heads at a time.

While a chunk is computed, the next chunk's inputs and the previous chunk's results are exchanged.
So only the first exchange of inputs and the last exchange of results are not overlapped. By default
all heads are one chunk.

Shapes: s rows of this rank, n rows of its group, b batch, h query heads, g key heads, d head_dim of
queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wf_backends.runtime.attention import AttentionCall, attend, differentiate
from wf_backends.runtime.autograd import below_autograd, first_order_only
from wf_backends.runtime.learned import Learned
from wf_backends.runtime.messages import Messages, Tensors
from wf_backends.runtime.ulysses import HeadExchange, HeadGroup, gather_rows, return_rows

Exchanges = Callable[[int], tuple[HeadExchange, ...]]  # chunk -> the exchange of each tensor


class UlyssesAttention(torch.autograd.Function):
    """attention(q, k, v, call, group, *learned) of this rank's rows, all heads -> out (b, s, h, e).

    q (b, s, h, d), k (b, s, g, d), v (b, s, g, e); the call and the learned parameters are of all
    heads, too. The gradients of the learned parameters are this rank's addends, from the rows and
    heads that it computes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        group: HeadGroup,
        *learned: Tensor | None,
    ) -> Tensor:
        parameters = Learned(*learned)
        saved: list[Tensor] = []

        def compute(chunk: int, qkv: Tensors) -> Tensors:
            q, k, v = qkv
            heads = group.heads(chunk)
            with below_autograd():
                results = attend(q, k, v, call.of_heads(heads), parameters.of_heads(heads))
            saved.extend((*qkv, *results))
            return results[:1]  # out

        labels = "forward ulysses qkv", "forward ulysses out"
        (out,) = _run_chunks(group, (q, k, v), group.qkv, group.out, labels, compute)
        ctx.call, ctx.group, ctx.num_learned = call, group, len(learned)
        ctx.save_for_backward(*learned, *saved)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        group: HeadGroup = ctx.group
        group.comm.enter(call.forward_pass.backward())
        all_saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        parameters, saved = all_saved[: ctx.num_learned], all_saved[ctx.num_learned :]
        learned = Learned(*parameters)
        num_saved = len(saved) // len(group.queries)  # of each chunk
        totals = [None if x is None else torch.zeros_like(x) for x in parameters]

        def compute(chunk: int, douts: Tensors) -> Tensors:
            chunk_saved = saved[chunk * num_saved : (chunk + 1) * num_saved]
            heads = group.heads(chunk)
            of_heads = call.of_heads(heads), learned.of_heads(heads)
            with below_autograd():
                *grads, learned_grads = differentiate(chunk_saved, douts[0], *of_heads)
            for total, grad in zip(totals, learned_grads, strict=False):
                if total is not None and grad is not None:
                    total[slice(*heads)] = grad
            return tuple(grads)

        labels = "backward ulysses out", "backward ulysses qkv"
        grads = _run_chunks(group, (dout,), group.out, group.qkv, labels, compute)
        return (*grads, None, None, *totals)


def _run_chunks(
    group: HeadGroup,
    xs: Tensors,
    input_exchanges: Exchanges,
    result_exchanges: Exchanges,
    labels: tuple[str, str],
    compute: Callable[[int, Tensors], Tensors],
) -> Tensors:
    """The results of `compute` for all chunks, of this rank's rows and all heads.

    Args:
        xs: the inputs, of this rank's rows and all heads.
        labels: of the messages of the inputs and of the results.
        compute: (chunk, its heads of the group's rows) -> the results for these heads and rows.
    """
    totals: Tensors = ()
    inputs, results = Messages(group.comm, labels[0]), Messages(group.comm, labels[1])
    next_xs = _gather_chunk(inputs, input_exchanges(0), xs)
    inputs.post()
    last = len(group.queries) - 1
    for chunk in range(last + 1):
        inputs.wait()
        chunk_xs = next_xs
        if chunk < last:
            inputs = Messages(group.comm, labels[0])
            next_xs = _gather_chunk(inputs, input_exchanges(chunk + 1), xs)
            inputs.post()
        ys, exchanges = compute(chunk, chunk_xs), result_exchanges(chunk)
        if not totals:
            pairs = zip(exchanges, ys, strict=True)
            totals = tuple(exchange.empty_total(group.comm.rank, y) for exchange, y in pairs)
        results.wait()
        results = Messages(group.comm, labels[1])
        for exchange, y, total in zip(exchanges, ys, totals, strict=True):
            return_rows(results, exchange, y, total)
        results.post()
    results.wait()
    return totals


def _gather_chunk(messages: Messages, exchanges: tuple[HeadExchange, ...], xs: Tensors) -> Tensors:
    """Add the messages that gather a chunk's heads of xs; the tensors that they fill."""
    pairs = zip(exchanges, xs, strict=True)
    return tuple(gather_rows(messages, exchange, x) for exchange, x in pairs)
