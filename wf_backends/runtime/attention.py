"""The autograd function of attention: it runs the two programs of a call, forward and backward.

Shapes: s rows of a buffer, b batch, h query heads, g key heads, d head_dim of queries and keys, e
of values, i query rows of a tile. Buffers are rows-first, so that a message is a contiguous slice:
q (s, b, h, d), kv = [K|V] (s, b, g, d + e).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wf_backends.comm import NO_PASS, Communicator, Pass
from wf_backends.kernels import Kernel, PositionBias, Scores, TileGrad, TileKernel, merge
from wf_backends.lowering import RankProgram, Tile
from wf_backends.runtime.autograd import below_autograd, first_order_only
from wf_backends.runtime.latents import LatentKernel
from wf_backends.runtime.learned import Learned, sinks_grad, with_sinks
from wf_backends.runtime.messages import (
    Accumulators,
    Combine,
    Tensors,
    accumulator_dtype,
    add,
    batch_first,
    copy,
    dense,
    fuse,
    pack,
    rows_first,
    scatter,
    unfuse,
)
from wf_backends.runtime.runner import PassInput, run
from wf_backends.runtime.shards import positions
from wf_backends.runtime.surrogate_out import SurrogateOut
from wf_backends.runtime.ulysses import HeadGroup, run_chunks
from wf_backends.schedule import Ranges


class AttentionCall(NamedTuple):
    """Everything about one attention call that is not a tensor."""

    forward: RankProgram
    backward: RankProgram
    comm: Communicator
    kernel: Kernel
    scores: Scores
    """For the query heads of the q that `attend` takes."""
    keep: tuple[bool, bool] = (False, False)
    """Whether gathered (queries, keys) are kept for the backward instead of gathered again."""
    narrow: bool = False
    """Whether partial results (out, dq, dk, dv) are sent in q's dtype."""
    forward_pass: Pass = NO_PASS
    group: HeadGroup | None = None
    """The ranks that exchange heads for tokens; None = a rank computes all heads of its rows."""

    def of_chunk(self, chunk: int, learned: Learned) -> tuple[AttentionCall, Learned]:
        """The call and its parameters for the query heads of a chunk."""
        if self.group is None:
            return self, learned
        heads = self.group.heads(chunk)
        return self._replace(scores=self.scores.of_heads(heads)), learned.of_heads(heads)


class RouteAttention(torch.autograd.Function):
    """attention(q, k, v, call, *learned) of this rank's rows, all heads -> out (b, s, h, e).

    q (b, s, h, d), k (b, s, g, d), v (b, s, g, e), or k and v as `LatentKernel` takes them; learned
    are the fields of `Learned`. The gradients of the learned parameters are this rank's addends,
    from the rows and heads that it computes, to be summed over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *learned: Tensor | None
    ) -> Tensor:
        saved: list[Tensor] = []

        def compute(chunk: int, qkv: Tensors) -> Tensors:
            q, k, v = qkv
            with below_autograd():
                results = attend(q, k, v, *call.of_chunk(chunk, Learned(*learned)))
            saved.extend((*qkv, *results))
            return results[:1]  # out

        group, xs = call.group, (dense(q), k, v)
        (out,) = run_chunks(group, xs, "forward", compute) if group else compute(0, xs)
        ctx.call, ctx.num_learned = call, len(learned)
        ctx.save_for_backward(*learned, *saved)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        group = call.group
        call.comm.enter(call.forward_pass.backward())
        all_saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        parameters, saved = all_saved[: ctx.num_learned], all_saved[ctx.num_learned :]
        num_saved = len(saved) // (len(group.queries) if group else 1)
        totals = [None if x is None else torch.zeros_like(x) for x in parameters]

        def compute(chunk: int, douts: Tensors) -> Tensors:
            of_chunk = call.of_chunk(chunk, Learned(*parameters))
            chunk_saved = saved[chunk * num_saved : (chunk + 1) * num_saved]
            with below_autograd():
                *grads, learned_grads = differentiate(chunk_saved, douts[0], *of_chunk)
            for total, grad in zip(totals, learned_grads, strict=False):
                if total is not None and grad is not None:
                    total[slice(*group.heads(chunk)) if group else ...] = grad
            return tuple(grads)

        grads = run_chunks(group, (dout,), "backward", compute) if group else compute(0, (dout,))
        return (*grads, None, *totals)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, learned: Learned) -> Tensors:
    """The forward: (out (b, s, h, e) in q's dtype, lse (s, b, h) in the accumulators', *gathered).

    `call.keep` says which of the gathered queries and [K|V] are returned.
    """
    queries, kv = rows_first(q), fuse(k, v)
    scores = _with_learned_bias(call.scores, learned)
    kernel: TileKernel = call.kernel
    value_dim = v.shape[3]
    if learned.up is not None:
        kernel = LatentKernel(kernel, learned.up)
        value_dim = learned.up.shape[1] - (q.shape[3] - k.shape[3])
    dtype, shape = accumulator_dtype(q.dtype), (*queries.shape[1:3], value_dim)
    message_dtypes = (q.dtype, dtype) if call.narrow else None  # of (out, lse)
    out_lse = Accumulators(
        (shape, shape[:-1]), (0.0, -inf), dtype, q.device, _merge, message_dtypes
    )
    no_results = Accumulators((), (), dtype, q.device, copy)
    sides = PassInput((queries,), out_lse), PassInput((kv,), no_results)
    tiles = ForwardTiles(kernel, scores, k.shape[3])
    results = run(call.forward, call.comm, "forward", tiles, *sides)
    out, lse = results[0].shard_results
    if learned.sinks is not None:
        out, lse = with_sinks(out, lse, learned.sinks)
    gathered = [side.gathered[0] for keep, side in zip(call.keep, results, strict=True) if keep]
    return batch_first(out).to(q.dtype), lse, *gathered


def differentiate(
    saved: Sequence[Tensor], dout: Tensor, call: AttentionCall, learned: Learned
) -> tuple[Tensor, Tensor, Tensor, Learned]:
    """The backward: (dq, dk, dv, gradients of `learned`); each as its tensor, in its dtype.

    Args:
        saved: q, k, v and everything that `attend` returned.
        dout: (b, s, h, e).
    """
    (q, k, v, out, lse, *gathered), dout = saved, dense(dout)
    kept_q, kept_kv = ((gathered.pop(0),) if keep else () for keep in call.keep)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    queries = (rows_first(q), rows_first(dout), torch.stack((lse, rows_first(delta)), dim=1))
    # Kept keys serve only where keys stay: their owners send keys that walk again.
    keys = kept_kv if kept_kv and call.backward.queries_walk else (fuse(k, v),)
    dtype, message_dtypes = accumulator_dtype(q.dtype), (q.dtype,) if call.narrow else None
    sums = (0.0,), dtype, q.device, add, message_dtypes
    sides = (
        PassInput(queries, Accumulators((queries[0].shape[1:],), *sums), kept_q),
        PassInput(keys, Accumulators((keys[0].shape[1:],), *sums), kept_kv),
    )
    scores = _with_learned_bias(call.scores, learned)
    latent_kernel = None if learned.up is None else LatentKernel(call.kernel, learned.up)
    own_out = SurrogateOut(queries[1], rows_first(out))
    tiles = BackwardTiles(latent_kernel or call.kernel, scores, k.shape[3], own_out)
    q_side, kv_side = run(call.backward, call.comm, "backward", tiles, *sides)
    (dq,), (dkv,) = q_side.shard_results, kv_side.shard_results
    grads = dq, *unfuse(dkv, k.shape[3])
    dq, dk, dv = (batch_first(grad).to(q.dtype) for grad in grads)
    learned_grads = Learned(
        None if learned.sinks is None else sinks_grad(learned.sinks, lse, delta),
        None if latent_kernel is None else latent_kernel.grad(),
        None if scores.bias is None else scores.bias.grad(),
    )
    return dq, dk, dv, learned_grads


def _with_learned_bias(scores: Scores, learned: Learned) -> Scores:
    """The scores with the learned bias, if there is one; it collects its gradient."""
    return scores if learned.bias is None else replace(scores, bias=PositionBias(learned.bias))


class _Tiles(ABC):
    """Computes tiles by a kernel; a `runner.ComputeTile`."""

    def __init__(self, kernel: TileKernel, scores: Scores, key_dim: int) -> None:
        self.kernel, self.scores, self.key_dim = kernel, scores, key_dim
        self._ignores_positions = scores.slopes is scores.dropout is scores.bias is None
        self._buffers: tuple[Tensors, Tensors] = ((), ())
        self._views: dict[Ranges, tuple[Tensors, Tensors]] = {}

    @abstractmethod
    def _kernel_queries(self, queries: Tensors, rows: Ranges) -> Tensors:
        """These rows of the query buffers as the kernel takes them."""

    def _scores_at(self, tile: Tile, q: Tensor) -> Scores:
        """The scores with the positions of the tile's rows and keys, on q's device."""
        return self.scores.at_positions(*(positions(shard, q.device) for shard in tile.positions))

    def _queries(
        self, rows: Ranges, queries: Tensors, results: Tensors
    ) -> tuple[Tensors, Tensors | None]:
        """These rows of the query buffers as the kernel takes them, and of the result buffers.

        For one range both are views, which later tiles on the same rows use again. For several
        ranges there is no view of the results: None.
        """
        if self._buffers[0] is not queries or self._buffers[1] is not results:
            self._buffers, self._views = (queries, results), {}
        if len(rows) != 1:
            return self._kernel_queries(queries, rows), None
        if rows not in self._views:
            result_views = tuple([pack(x, rows) for x in results])
            self._views[rows] = self._kernel_queries(queries, rows), result_views
        return self._views[rows]


class ForwardTiles(_Tiles):
    """Forward tiles. Queries (q), their results (out, lse); keys ([K|V]), without results."""

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, q_results: Tensors, k_results: Tensors
    ) -> None:
        """Compute a tile; see runner.ComputeTile."""
        (q,), views = self._queries(tile.rows, queries, q_results)
        k, v = unfuse(pack(keys[0], tile.keys).transpose(0, 1), self.key_dim)
        scores = self.scores if self._ignores_positions else self._scores_at(tile, q)
        out, lse = self.kernel.forward(q, k, v, scores, tile.band)
        values = rows_first(out), lse.permute(2, 0, 1)
        _combine(copy if tile.first_on_rows else _merge, views, q_results, tile.rows, values)

    def _kernel_queries(self, queries: Tensors, rows: Ranges) -> Tensors:
        return (batch_first(pack(queries[0], rows)),)


class BackwardTiles(_Tiles):
    """Backward tiles. Queries (q, dout, [lse, delta]), results (dq); keys ([K|V]), ([dK|dV]).

    Args:
        own_out: the outputs of this rank's own queries.
    """

    def __init__(
        self, kernel: TileKernel, scores: Scores, key_dim: int, own_out: SurrogateOut
    ) -> None:
        super().__init__(kernel, scores, key_dim)
        self._out = own_out

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, q_results: Tensors, k_results: Tensors
    ) -> None:
        """Compute a tile; see runner.ComputeTile."""
        (q, dout, out, lse, delta), views = self._queries(tile.rows, queries, q_results)
        k, v = unfuse(pack(keys[0], tile.keys).transpose(0, 1), self.key_dim)
        tile_grad = TileGrad(dout, q, k, v, out, lse, delta)
        scores = self.scores if self._ignores_positions else self._scores_at(tile, q)
        dq, dk, dv = self.kernel.backward(tile_grad, scores, tile.band)
        combine = copy if tile.first_on_rows else add
        _combine(combine, views, q_results, tile.rows, (rows_first(dq),))
        combine = copy if tile.first_on_keys else add
        grads = rows_first(dk), rows_first(dv)
        scatter(unfuse(k_results[0], self.key_dim), combine, tile.keys, grads)

    def _kernel_queries(self, queries: Tensors, rows: Ranges) -> Tensors:
        """q, dout, out (b, i, h, d or e) and lse, delta (b, h, i)."""
        q, dout, stats = queries
        if self._out.dout is not dout:  # queries of other owners
            self._out = SurrogateOut(dout)
        out = self._out.read(rows, stats)
        lse, delta = pack(stats, rows).permute(1, 2, 3, 0).unbind(0)
        q, dout, out = [batch_first(pack(x, rows)) for x in (q, dout, out)]
        return q, dout, out, lse, delta


def _combine(
    combine: Combine, views: Tensors | None, buffers: Tensors, rows: Ranges, values: Tensors
) -> None:
    """Combine values into the views of these rows of the buffers, or where None into the rows."""
    if views is None:
        scatter(buffers, combine, rows, values)
    else:
        combine(views, values)


def _merge(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by merging (out, lse) of other keys into the targets (out, lse)."""
    merge(*targets, *values)
