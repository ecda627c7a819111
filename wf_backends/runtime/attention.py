"""One executor: it runs any plan, forward and backward.

Shapes: s rows of a buffer, b batch, h query heads, g key heads, d head_dim. Buffers are
rows-first, so that a message is a contiguous slice: q (s, b, h, d), kv = [K|V] (s, 2, b, g, d).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from wf_backends.comm import Communicator
from wf_backends.kernels import Kernel, TileGrad, merge_
from wf_backends.lowering import RankProgram, Tile
from wf_backends.runtime.messages import Tensors, add, copy, pack, scatter
from wf_backends.runtime.runner import Accumulators, Pass, run
from wf_backends.runtime.surrogate_out import Outputs
from wf_backends.schedule import globalize, size


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about one attention call that is not a tensor.

    Plans are of the same rank; several plans of a pass share its work.
    """

    forward: tuple[RankProgram, ...]
    backward: tuple[RankProgram, ...]
    comm: Communicator
    kernel: Kernel
    scale: float
    keep: tuple[bool, bool] = (False, False)
    """Whether gathered (queries, keys) are kept for the backward instead of gathered again."""


class Attention(torch.autograd.Function):
    """attention(q, k, v) of this rank's rows; q (b, s, h, d), k and v (b, s, g, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q = dense(q)
        out, *held = attend(q, k, v, call)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, *held)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*differentiate(ctx.saved_tensors, dout, ctx.call), None)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensors:
    """The forward: (out, what the backward needs beside q, k, v and out)."""
    queries, kv = _rows_first(q), _fuse(k, v)
    work = ForwardWork(call.kernel, call.scale, call.forward[0].queries_walk, queries)
    sides = work.ordered((queries,), (kv,))
    passes = [Pass(plan, call.comm, "forward", *sides, work) for plan in call.forward]
    (out, lse), _ = work.ordered(*run(passes))
    held = work.ordered(passes[0].stay, passes[0].gathered)
    gathered = [side[0] for keep, side in zip(call.keep, held, strict=True) if keep]
    return _batch_first(out).to(q.dtype), lse, *gathered


def differentiate(saved: Sequence[Tensor], dout: Tensor, call: Call) -> Tensors:
    """The backward: (dq, dk, dv).

    Args:
        saved: q, k, v and everything that `attend` gave.
    """
    (q, k, v, out, lse, *gathered), dout = saved, dense(dout)
    kept = tuple((gathered.pop(0),) if keep else () for keep in call.keep)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    stats = torch.stack((lse, _rows_first(delta)), dim=1)
    queries, turn = (_rows_first(q), _rows_first(dout), stats), call.backward[0].queries_walk
    keys = turn and kept[1] or (_fuse(k, v),)  # keys that walk are sent anew by their owners
    own = Outputs(queries[1], _rows_first(out), ((0, len(queries[1])),))
    work = BackwardWork(call.kernel, call.scale, turn, queries, keys, own)
    sides = work.ordered(queries, keys)
    kept = work.ordered(*kept)
    grads = run([Pass(p, call.comm, "backward", *sides, work, kept) for p in call.backward])
    (dq,), (dkv,) = work.ordered(*grads)
    dq, dk, dv = (_batch_first(g).to(q.dtype) for g in (dq, *dkv.unbind(1)))
    return dq, dk, dv


class _Work(ABC):
    """Tiles of a pass, in pieces, by a kernel; either side may walk."""

    def __init__(self, kernel: Kernel, scale: float, queries_walk: bool) -> None:
        self.kernel, self.scale, self.queries_walk = kernel, scale, queries_walk

    def ordered(self, a: Any, b: Any) -> tuple[Any, Any]:
        """(stay, walk) from (queries, keys); and back, since it is its own inverse."""
        return (b, a) if self.queries_walk else (a, b)

    def compute(
        self, tile: Tile, stay: Tensors, held: Tensors, partial: Tensors, moving: Tensors
    ) -> None:
        sides, collected = self.ordered(stay, held), self.ordered(partial, moving)
        for part in split(self.kernel, tile, stay[0].device):
            self._compute(part, *sides, *collected)

    @abstractmethod
    def _compute(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None:
        """One kernel call, and what it finds combined into what the sides collect."""


class ForwardWork(_Work):
    """Queries are (q) and collect (out, lse); keys collect nothing."""

    def __init__(self, kernel: Kernel, scale: float, queries_walk: bool, queries: Tensor) -> None:
        super().__init__(kernel, scale, queries_walk)
        like, dtype = (queries, queries[..., 0]), accumulator_dtype(queries.dtype)
        found = Accumulators(like, (0.0, -inf), dtype, _merge)
        self.stay, self.walk = self.ordered(found, Accumulators((), (), dtype, copy))

    def _compute(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None:
        kv = pack(keys[0], tile.keys)
        q, k, v = map(_batch_first, (pack(queries[0], tile.rows), *kv.unbind(1)))
        out, lse = self.kernel.forward(q, k, v, self.scale, tile.band)
        combine = copy if tile.first_on_rows else _merge
        scatter(to_queries, tile.rows, (_rows_first(out), lse.permute(2, 0, 1)), combine)


class BackwardWork(_Work):
    """Queries are (q, dout, [lse, delta]) and collect dq; keys collect dkv."""

    def __init__(
        self,
        kernel: Kernel,
        scale: float,
        queries_walk: bool,
        queries: Tensors,
        keys: Tensors,
        own: Outputs,
    ) -> None:
        super().__init__(kernel, scale, queries_walk)
        self.outputs = [own]
        dtype = accumulator_dtype(queries[0].dtype)
        sides = self.ordered(queries[:1], keys)
        self.stay, self.walk = (Accumulators(like, (0.0,), dtype, add) for like in sides)

    def _compute(
        self, tile: Tile, queries: Tensors, keys: Tensors, to_queries: Tensors, to_keys: Tensors
    ) -> None:
        out = self._outputs(queries[1]).read(tile.rows, queries[2])
        q, dout, out, stats = (pack(x, tile.rows) for x in (*queries[:2], out, queries[2]))
        q, dout, out = map(_batch_first, (q, dout, out))
        lse, delta = (x.permute(1, 2, 0) for x in stats.unbind(1))
        k, v = map(_batch_first, pack(keys[0], tile.keys).unbind(1))
        given = TileGrad(dout, q, k, v, out, lse, delta)
        grads = self.kernel.backward(given, self.scale, tile.band)
        grads = tuple(map(_rows_first, grads))
        scatter(to_queries, tile.rows, grads[:1], copy if tile.first_on_rows else add)
        halves = to_keys[0].unbind(1)
        scatter(halves, tile.keys, grads[1:], copy if tile.first_on_keys else add)

    def _outputs(self, dout: Tensor) -> Outputs:
        """Those of the queries in a buffer; walkers are in one for a step alone."""
        found = next((one for one in self.outputs if one.dout is dout), None)
        if found is None:
            found = Outputs(dout)
            self.outputs = [*([] if self.queries_walk else self.outputs), found]
        return found


def split(kernel: Kernel, tile: Tile, device: torch.device) -> Iterator[Tile]:
    """The tile in the pieces in which the kernel is best handed it."""
    pieces = kernel.split(size(tile.rows), size(tile.keys), tile.band, device)
    if len(pieces) == 1:
        yield tile
        return
    for at, piece in enumerate(pieces):
        keys = globalize(((piece.keys.start, piece.keys.stop),), tile.keys)
        first = tile.first_on_rows and not at  # all have all rows
        yield replace(tile, keys=keys, band=piece.band, first_on_rows=first)


def _merge(targets: Tensors, values: Tensors) -> None:
    """Combine by folding other keys' (out, lse) into these."""
    merge_(*targets, *values)


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


def _fuse(k: Tensor, v: Tensor) -> Tensor:
    """One buffer, so that one message carries both: (s, 2, b, g, d)."""
    return torch.stack((_rows_first(k), _rows_first(v)), dim=1)
