"""The autograd function of attention: it runs the two programs of a call, forward and backward.

Shapes: s rows of a buffer, b batch, h query heads, g key heads, d head_dim of queries and keys, e
of values. Buffers are rows-first, so that a message is a contiguous slice: q (s, b, h, d),
kv = [K|V] (s, b, g, d + e).
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
from wf_backends.kernels import Kernel, PositionBias, Scores, TileGrad, merge
from wf_backends.lowering import RankProgram, Tile
from wf_backends.runtime.autograd import below_autograd, first_order_only
from wf_backends.runtime.latents import LatentKernel
from wf_backends.runtime.learned import Learned, sinks_grad, with_sinks
from wf_backends.runtime.messages import Accumulators, Combine, Tensors, add, copy, pack, scatter
from wf_backends.runtime.runner import Side, run
from wf_backends.runtime.shards import positions
from wf_backends.runtime.surrogate_out import SurrogateOut
from wf_backends.schedule import Range, Ranges


class Call(NamedTuple):
    """Everything about one attention call that is not a tensor."""

    forward: RankProgram
    backward: RankProgram
    comm: Communicator
    kernel: Kernel
    scores: Scores
    """Of the query heads that `attend` is given."""
    keep: tuple[bool, bool] = (False, False)
    """Whether gathered (queries, keys) are kept for the backward instead of gathered again."""
    narrow: bool = False
    """Whether partial results (out, dq, dk, dv) travel in q's dtype."""
    now: Pass = NO_PASS
    """Its forward."""

    def of_heads(self, heads: Range) -> Call:
        """The call of some of the query heads that this one is of."""
        return self._replace(scores=self.scores.of_heads(heads))


class Attention(torch.autograd.Function):
    """attention(q, k, v, call, *learned) of this rank's rows.

    q (b, s, h, d), k (b, s, g, d), v (b, s, g, e), or k and v as `LatentKernel` takes them. Of the
    gradients of what is learned this is the part that this rank computes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        *learned: Tensor | None,
    ) -> Tensor:
        q = dense(q)
        with below_autograd():
            out, *held = attend(q, k, v, call, Learned(*learned))
        ctx.call, ctx.num_learned = call, len(learned)
        ctx.save_for_backward(*learned, q, k, v, out, *held)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.comm.enter(ctx.call.now.backward())
        given, n = ctx.saved_tensors, ctx.num_learned
        with below_autograd():
            *grads, parts = differentiate(given[n:], dout, ctx.call, Learned(*given[:n]))
        return (*grads, None, *parts[:n])


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, learned: Learned) -> Tensors:
    """The forward: (out, what the backward needs beside q, k, v, learned and out)."""
    queries, kv, kernel, width = _rows_first(q), fuse(k, v), call.kernel, v.shape[3]
    (sinks, up, _), scores = learned, _biased(call.scores, learned)
    if up is not None:
        kernel, width = LatentKernel(kernel, up), up.shape[1] - (q.shape[3] - k.shape[3])
    dtype, shape = accumulator_dtype(q.dtype), (*queries.shape[1:3], width)
    wire = (q.dtype, dtype) if call.narrow else None  # of out; lse travels as it is
    found = Accumulators((shape, shape[:-1]), (0.0, -inf), dtype, q.device, _merge, wire)
    sides = Side((queries,), found), Side((kv,), Accumulators((), (), dtype, q.device, copy))
    tiles = ForwardTiles(kernel, scores, k.shape[3])
    results = run(call.forward, call.comm, "forward", tiles, *sides)
    out, lse = results[0].own
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    gathered = [one.gathered[0] for keep, one in zip(call.keep, results, strict=True) if keep]
    return _batch_first(out).to(q.dtype), lse, *gathered


def differentiate(
    saved: Sequence[Tensor], dout: Tensor, call: Call, learned: Learned
) -> tuple[Tensor, Tensor, Tensor, Learned]:
    """The backward: (dq, dk, dv, of what is learned).

    Args:
        saved: q, k, v and everything that `attend` gave.
    """
    (q, k, v, out, lse, *gathered), dout = saved, dense(dout)
    kept_q, kept_kv = ((gathered.pop(0),) if keep else () for keep in call.keep)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    queries = (_rows_first(q), _rows_first(dout), torch.stack((lse, _rows_first(delta)), dim=1))
    turn, dtype = call.backward.queries_walk, accumulator_dtype(q.dtype)
    keys = turn and kept_kv or (fuse(k, v),)  # keys that walk are sent anew by their owners
    summed = (0.0,), dtype, q.device, add, (q.dtype,) if call.narrow else None
    sides = (
        Side(queries, Accumulators((queries[0].shape[1:],), *summed), kept_q),
        Side(keys, Accumulators((keys[0].shape[1:],), *summed), kept_kv),
    )
    (sinks, up, _), scores = learned, _biased(call.scores, learned)
    latent = None if up is None else LatentKernel(call.kernel, up)
    own = SurrogateOut(queries[1], _rows_first(out))
    tiles = BackwardTiles(latent or call.kernel, scores, k.shape[3], own)
    (dq,), (dkv,) = (side.own for side in run(call.backward, call.comm, "backward", tiles, *sides))
    grads = dq, *unfuse(dkv, k.shape[3])
    dq, dk, dv = (_batch_first(grad).to(q.dtype) for grad in grads)
    of_learned = Learned(
        None if sinks is None else sinks_grad(sinks, lse, delta),
        None if latent is None else latent.grad(),
        None if scores.bias is None else scores.bias.grad(),
    )
    return dq, dk, dv, of_learned


def _biased(scores: Scores, learned: Learned) -> Scores:
    """The scores with a learned bias, which collects its gradient."""
    return scores if learned.bias is None else replace(scores, bias=PositionBias(learned.bias))


class _Tiles(ABC):
    """Tiles by a kernel; a `runner.ComputeTile`."""

    def __init__(self, kernel: Kernel, scores: Scores, key_dim: int) -> None:
        self.kernel, self.scores, self.key_dim = kernel, scores, key_dim
        # Whether positions do not matter.
        self._anywhere = scores.slopes is scores.dropout is scores.bias is None
        self._buffers: tuple[Tensors, Tensors] = ((), ())
        self._views: dict[Ranges, tuple[Tensors, Tensors]] = {}
        self._outs: SurrogateOut | None = None

    @abstractmethod
    def _given(self, queries: Tensors, rows: Ranges) -> Tensors:
        """The rows of queries as the kernel takes them."""

    def _scores(self, tile: Tile, q: Tensor) -> Scores:
        """The tile's, on q's device."""
        return self.scores.at_positions(*(positions(one, q.device) for one in tile.positions))

    def _queries(
        self, rows: Ranges, queries: Tensors, found: Tensors
    ) -> tuple[Tensors, Tensors | None]:
        """The rows of queries as the kernel takes them, and the place of their results.

        One slice is a view, which later tiles on the same rows use again. Several have no place.
        """
        if self._buffers[0] is not queries or self._buffers[1] is not found:
            self._buffers, self._views, self._outs = (queries, found), {}, None
        if len(rows) != 1:
            return self._given(queries, rows), None
        if rows not in self._views:
            place = tuple([pack(x, rows) for x in found])
            self._views[rows] = self._given(queries, rows), place
        return self._views[rows]


class ForwardTiles(_Tiles):
    """Queries are (q) and collect (out, lse); keys are ([K|V]) and collect nothing."""

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None:
        """Compute a tile; see runner.ComputeTile."""
        (q,), place = self._queries(tile.rows, queries, to_queries)
        k, v = unfuse(pack(keys[0], tile.keys).transpose(0, 1), self.key_dim)
        scores = self.scores if self._anywhere else self._scores(tile, q)
        out, lse = self.kernel.forward(q, k, v, scores, tile.band)
        found = _rows_first(out), lse.permute(2, 0, 1)
        _combine(copy if tile.first_on_rows else _merge, place, to_queries, tile.rows, found)

    def _given(self, queries: Tensors, rows: Ranges) -> Tensors:
        return (_batch_first(pack(queries[0], rows)),)


class BackwardTiles(_Tiles):
    """Queries are (q, dout, [lse, delta]) and collect (dq); keys are ([K|V]), collect ([dK|dV]).

    Args:
        own: of this rank's queries.
    """

    def __init__(self, kernel: Kernel, scores: Scores, key_dim: int, own: SurrogateOut) -> None:
        super().__init__(kernel, scores, key_dim)
        self._own = own

    def __call__(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None:
        """Compute a tile; see runner.ComputeTile."""
        (q, dout, out, lse, delta), place = self._queries(tile.rows, queries, to_queries)
        k, v = unfuse(pack(keys[0], tile.keys).transpose(0, 1), self.key_dim)
        given = TileGrad(dout, q, k, v, out, lse, delta)
        scores = self.scores if self._anywhere else self._scores(tile, q)
        dq, dk, dv = self.kernel.backward(given, scores, tile.band)
        combine = copy if tile.first_on_rows else add
        _combine(combine, place, to_queries, tile.rows, (_rows_first(dq),))
        combine = copy if tile.first_on_keys else add
        grads = _rows_first(dk), _rows_first(dv)
        scatter(unfuse(to_keys[0], self.key_dim), combine, tile.keys, grads)

    def _given(self, queries: Tensors, rows: Ranges) -> Tensors:
        q, dout, stats = queries
        if self._outs is None:
            self._outs = self._own if self._own.dout is dout else SurrogateOut(dout)
        out = self._outs.read(rows, stats)
        lse, delta = pack(stats, rows).permute(1, 2, 3, 0).unbind(0)
        q, dout, out = [_batch_first(pack(x, rows)) for x in (q, dout, out)]
        return q, dout, out, lse, delta


def _combine(
    combine: Combine, place: Tensors | None, buffers: Tensors, rows: Ranges, found: Tensors
) -> None:
    """Combine what was found for the rows into their place, or into their slices of the buffers."""
    if place is None:
        scatter(buffers, combine, rows, found)
    else:
        combine(place, found)


def _merge(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Combine by folding the (out, lse) of other keys into the targets."""
    merge(*targets, *values)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What out, lse, dq, dk, dv are summed in: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(x: Tensor) -> Tensor:
    """x (..., d) with each row in one piece, as kernels read it whatever its strides say."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def fuse(k: Tensor, v: Tensor) -> Tensor:
    """One rows-first buffer [K|V], so that one message carries both: (s, b, g, d + e)."""
    return torch.cat((_rows_first(k), _rows_first(v)), dim=-1)


def unfuse(kv: Tensor, head_dim: int) -> Tensors:
    """The two parts of [K|V] or [dK|dV], as views; K's last dimension is `head_dim`."""
    return kv.split_with_sizes((head_dim, kv.size(-1) - head_dim), -1)
