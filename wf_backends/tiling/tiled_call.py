"""A module's call, computed tile by tile along a dimension and computed again in the backward.

    y[t] = f(x[t]; w)  for every tile t;   dx[t] = dy[t] df/dx;   dw = sum over t of dy[t] df/dw

The forward keeps its inputs and nothing else. The parameters are inputs of one autograd function,
so each gets one gradient a call, and what DDP, FSDP2 and ZeRO hang on it runs once.

That f may be cut is for the caller to know: rows of the result may depend on the same rows of the
inputs only, and nothing may be drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from wf_backends._compile import eager

HALF = (torch.float16, torch.bfloat16)
_HOLE = object()  # where a tensor stands among the leaves of a call


class Original(nn.Module):
    """What a module computed before its instance got a forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.compute = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_gathered_by_part(self.module)
        return self.compute(*args, **kwargs)


def _refuse_gathered_by_part(module: nn.Module) -> None:
    """Refuse a module whose parts have their parameters gathered by hooks: once for every tile."""
    for name, part in module.named_modules():
        if name and "ds_id" in vars(part):  # DeepSpeed hooked it
            raise NotImplementedError(
                f"ZeRO 3 would gather {name!r} of a tiled {type(module).__name__} for every tile: "
                "call deepspeed.utils.set_z3_leaf_module(module, True) before deepspeed.initialize"
            )
        if name and any(base.__name__ == "FSDPModule" for base in type(part).__mro__):
            raise NotImplementedError(
                f"FSDP2 would gather {name!r} of a tiled {type(module).__name__} for every tile: "
                "call fully_shard on the module or on what holds it, not on its parts"
            )


class TiledCall:
    """In the place of a module's `forward`.

    Args:
        fn: what is computed by tile, with the parameters it uses. Its own hooks do not run.
        dim, tiles: as `Tiles` has them.
    """

    def __init__(self, fn: nn.Module, dim: int, tiles: int) -> None:
        self.fn, self.dim, self.tiles = fn, dim, tiles
        self.names = list(_parameters_of(fn))

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns: tensors in tuples, lists and dicts."""
        leaves, spec = tree_flatten((args, kwargs))
        call = _Call(self, leaves, spec)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return call.whole(_Tiled.apply(call, *inputs, *self._parameters()))

    def _parameters(self) -> list[Tensor]:
        """The parameters as they are now: FSDP2 and ZeRO 3 exchange them around every call."""
        now = _parameters_of(self.fn)
        if list(now) != self.names:
            raise NotImplementedError(
                f"{self.names[0]!r} is no parameter of the tiled module any more, as under FSDP "
                "with use_orig_params=False: use FSDP2 (fully_shard)"
            )
        return list(now.values())


def _parameters_of(fn: nn.Module) -> dict[str, Tensor]:
    """By each module's first name, as `functional_call` with `tie_weights=False` wants them."""
    return {
        name: parameter
        for path, module in fn.named_modules()
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False)
    }


class _Call:
    """One call: how tensors become the arguments of a tile, and results of tiles one result.

    Its tensors are those of the arguments, in order, and then the parameters.
    """

    def __init__(self, tiled: TiledCall, leaves: list[Any], spec: TreeSpec) -> None:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.tiled, self.spec, self.num_inputs = tiled, spec, len(inputs)
        self.leaves = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.rows = _rows(inputs, tiled.dim)
        self.cut = [_has_rows(x, tiled.dim, self.rows) for x in inputs]
        self.cut += [False] * len(tiled.names)
        self.autocast = _autocast(inputs[0].device.type)
        self.results: list[Any] = []
        self.result_spec: TreeSpec | None = None

    def bounds(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of every tile, all of one size but the last."""
        step = max(1, -(-self.rows // self.tiled.tiles))
        for first in range(0, max(1, self.rows), step):
            yield first, min(step, self.rows - first)

    def tile(self, tensors: Sequence[Tensor], first: int, rows: int) -> list[Tensor]:
        """The tensors of one tile; contiguous, because modules may take views of what they get."""
        cut = (self.tiled.dim, first, rows)
        pairs = zip(tensors, self.cut, strict=True)
        return [x.narrow(*cut).contiguous() if is_cut else x for x, is_cut in pairs]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among the results of one tile."""
        given, parameters = iter(tensors[: self.num_inputs]), tensors[self.num_inputs :]
        leaves = [next(given) if leaf is _HOLE else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        named = dict(zip(self.tiled.names, parameters, strict=True))
        found = torch.func.functional_call(self.tiled.fn, named, args, kwargs, tie_weights=False)
        leaves, self.result_spec = tree_flatten(found)
        self.results = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the call, from its tensors."""
        assert self.result_spec is not None, "no tile has run"
        given = iter(tensors)
        leaves = [next(given) if leaf is _HOLE else leaf for leaf in self.results]
        return tree_unflatten(leaves, self.result_spec)


class _Tiled(torch.autograd.Function):
    """Tensors of the arguments, then parameters -> tensors of the result."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        dim, whole = call.tiled.dim, list[Tensor]()
        for first, rows in call.bounds():
            found = call.run([x.detach() for x in call.tile(tensors, first, rows)])
            _refuse_without_rows(found, dim, rows)
            whole = whole or [part.new_empty(_resized(part, dim, call.rows)) for part in found]
            for one, part in zip(whole, found, strict=True):
                one.narrow(dim, first, rows).copy_(part)
        ctx.mark_non_differentiable(*(one for one in whole if not one.is_floating_point()))
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, tensors, needed = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        sums = [
            _Gradient(x, cut) if wanted else None
            for x, cut, wanted in zip(tensors, call.cut, needed, strict=True)
        ]
        dim = call.tiled.dim
        for first, rows in call.bounds():
            tile = call.tile(tensors, first, rows)
            places = [one and one.place(dim, first, rows) for one in sums]
            leaves = [_leaf(x, place) for x, place in zip(tile, places, strict=True)]
            with torch.enable_grad(), call.autocast():
                found = call.run(leaves)
            wanted = [
                (part, grad.narrow(dim, first, rows))
                for part, grad in zip(found, grads, strict=True)
                if grad is not None and part.requires_grad
            ]
            if wanted:
                torch.autograd.backward([part for part, _ in wanted], [grad for _, grad in wanted])
        return None, *(one and one.total() for one in sums)


class _Gradient:
    """The gradient of one tensor of a call, from those of its tiles."""

    def __init__(self, x: Tensor, cut: bool) -> None:
        self._dtype, self._cut = x.dtype, cut
        self._total = torch.zeros_like(x) if cut else None

    def place(self, dim: int, first: int, rows: int) -> Callable[[Tensor], Any]:
        """What takes the gradient of a tile."""
        if self._cut:
            assert self._total is not None
            return self._total.narrow(dim, first, rows).copy_
        return self._add

    def _add(self, grad: Tensor) -> None:
        if self._total is not None:
            self._total += grad
        else:  # of many tiles, a sum in 16 bits would drift
            self._total = grad.float() if grad.dtype in HALF else grad

    def total(self) -> Tensor | None:
        return None if self._total is None else self._total.to(self._dtype)


def _leaf(x: Tensor, place: Callable[[Tensor], Any] | None) -> Tensor:
    """`x` as a tile takes it; its gradient goes to `place` as soon as it is there."""

    def take(leaf: Tensor) -> None:
        assert place is not None and leaf.grad is not None
        place(leaf.grad)
        leaf.grad = None

    leaf = x.detach()
    if place is not None:
        leaf.requires_grad_().register_post_accumulate_grad_hook(take)
    return leaf


def _rows(inputs: Sequence[Tensor], dim: int) -> int:
    for x in inputs:
        if x.dim() > dim:
            return x.shape[dim]
    shapes = [tuple(x.shape) for x in inputs]
    raise ValueError(f"no argument of a tiled module has a dim {dim}, got {shapes}")


def _has_rows(x: Tensor, dim: int, rows: int) -> bool:
    return x.dim() > dim and x.shape[dim] == rows


def _resized(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _refuse_without_rows(found: Sequence[Tensor], dim: int, rows: int) -> None:
    for part in found:
        if not _has_rows(part, dim, rows):
            raise NotImplementedError(
                f"a tiled module must return rows along dim {dim}, as many as it gets: "
                f"{rows} rows gave {tuple(part.shape)}"
            )


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast that holds now, to be entered later."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    state = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, *state, torch.is_autocast_cache_enabled())
