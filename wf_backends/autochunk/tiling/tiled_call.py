"""A module's call, computed tile by tile along a dimension, and again in the backward.

    y[t] = f(x[t]; w)  for every tile t;   dx[t] = dy[t] df/dx;   dw = sum over t of dy[t] df/dw

The forward keeps only its inputs for the backward. The parameters are inputs of one autograd
function: each gets one gradient for each call, so that the hooks of DDP, FSDP2 and ZeRO run once.

The caller must know that f may be cut: each row of the results may depend only on the same row of
the inputs, and f must not draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from wf_backends._compile import eager
from wf_backends.autochunk.graph import in_fake_run
from wf_backends.runtime import first_order_only

MakeContext = Callable[[], AbstractContextManager[Any]]
_TENSOR = object()  # in the place of a tensor among the leaves of a call


class TiledCall:
    """Replaces a module's `forward`.

    Args:
        fn: the module to compute, with the parameters that it uses. Its own hooks do not run.
        dim, tiles: as in `Tiles`.

    Attributes:
        contexts: called with each call; what they return makes contexts for its recomputation, such
            as that of a call's documents.
    """

    def __init__(self, fn: nn.Module, dim: int, tiles: int) -> None:
        self.fn, self.dim, self.tiles = fn, dim, tiles
        self.contexts: tuple[Callable[[], MakeContext], ...] = ()
        self.owners = _weights_of(fn)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of `fn`: tensors in tuples, lists and dicts."""
        call, tensors = self.prepared(args, kwargs)
        results = _Tiled.apply(call, *tensors)
        for result, asked in zip(results, call.asked_for_grads, strict=True):
            if asked:  # by a hook, as that of transformers' `enable_input_require_grads`
                result.requires_grad_()
        return call.assemble(results)

    def prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallInTiles, list[Tensor]]:
        """A call, and the tensors that its methods take."""
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return CallInTiles(self, leaves, spec), [*inputs, *self._weights()]

    def _weights(self) -> list[Tensor]:
        """The current weights: FSDP and ZeRO 3 exchange them, FSDP1 for plain attributes."""
        tensors: dict[str, Any] = {
            key: ({**owner._parameters, **owner._buffers} | vars(owner)).get(name)
            for key, (owner, name) in self.owners.items()
        }
        for key in {**tensors, **_weights_of(self.fn)}:
            if not isinstance(tensors.get(key), Tensor):
                raise NotImplementedError(
                    f"{key!r} was added to a tiled module, or removed: tile a complete model; FSDP1"
                    " must wrap no part of a tiled module, and needs use_orig_params=True"
                )
        return [*tensors.values()]


def _weights_of(fn: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The owner of each parameter and buffer and its name there; once for each module, as
    `functional_call(tie_weights=False)` needs."""
    return {
        f"{path}.{name}": (module, name)
        for path, module in fn.named_modules()
        for name, weight in (*module._parameters.items(), *module._buffers.items())
        if weight is not None
    }


@contextmanager
def _without_attributes(owners: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Inside, modules have no attribute beside a parameter of its name: FSDP1 sets such."""
    taken = [
        (vars(owner), name, vars(owner).pop(name))
        for owner, name in owners
        if name in owner._parameters and name in vars(owner)
    ]
    try:
        yield
    finally:
        for attributes, name, value in taken:
            attributes[name] = value


class CallInTiles:
    """One call of a tiled module: makes the arguments of a tile, and one result from all tiles.

    `tensors` in its methods are the tensors among the arguments, in order, then the weights.
    """

    def __init__(self, tiled: TiledCall, leaves: list[Any], spec: TreeSpec) -> None:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.tiled, self.spec, self.num_inputs = tiled, spec, len(inputs)
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.rows = _rows(inputs, tiled.dim)
        self.is_cut = [_has_rows(x, tiled.dim, self.rows) for x in inputs]
        self.is_cut += [False] * len(tiled.owners)
        self.contexts = [_current_autocast(inputs[0].device.type), *(c() for c in tiled.contexts)]
        self.result_leaves, self.asked_for_grads = list[Any](), list[bool]()
        self.result_spec: TreeSpec | None = None

    def bounds(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of every tile; the last may be smaller. Where only memory is counted:
        of the first two, whose gradients are added, and of the last one."""
        tile_rows = max(1, -(-self.rows // self.tiled.tiles))
        starts = range(0, max(1, self.rows), tile_rows)
        if in_fake_run():
            starts = dict.fromkeys((*starts[:2], starts[-1]))
        for first in starts:
            yield first, min(tile_rows, self.rows - first)

    def tile(self, tensors: Sequence[Tensor], first: int, rows: int) -> list[Tensor]:
        """The tensors of one tile; contiguous, because modules may take views of their inputs."""
        pairs, dim = zip(tensors, self.is_cut, strict=True), self.tiled.dim
        return [x.narrow(dim, first, rows).contiguous() if cut else x for x, cut in pairs]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute one tile; returns the tensors among its results."""
        inputs, weights = tensors[: self.num_inputs], tensors[self.num_inputs :]
        args, kwargs = tree_unflatten(_fill(self.leaves, inputs), self.spec)
        named = dict(zip(self.tiled.owners, weights, strict=True))
        with _without_attributes(self.tiled.owners.values()):
            result = functional_call(self.tiled.fn, named, args, kwargs, tie_weights=False)
        leaves, self.result_spec = tree_flatten(result)
        self.result_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def assemble(self, results: Sequence[Tensor]) -> Any:
        """The result of the call, from the tensors in it."""
        assert self.result_spec is not None, "no tile has run"
        return tree_unflatten(_fill(self.result_leaves, results), self.result_spec)


def _fill(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The leaves, with the tensors in the places of `_TENSOR`."""
    remaining = iter(tensors)
    return [next(remaining) if leaf is _TENSOR else leaf for leaf in leaves]


class _Tiled(torch.autograd.Function):
    """Tensors of the arguments, then weights -> tensors of the result."""

    @staticmethod
    def forward(ctx: Any, call: CallInTiles, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        dim, results = call.tiled.dim, list[Tensor]()
        for first, rows in call.bounds():
            parts = call.run([x.detach() for x in call.tile(tensors, first, rows)])
            _refuse_without_rows(parts, dim, rows)
            if first == 0:
                call.asked_for_grads = [x.requires_grad for x in parts]
                shapes = [(*x.shape[:dim], call.rows, *x.shape[dim + 1 :]) for x in parts]
                results = [x.new_empty(shape) for x, shape in zip(parts, shapes, strict=True)]
            for result, part in zip(results, parts, strict=True):
                result.narrow(dim, first, rows).copy_(part)
        without_grads = (x for x in results if not (x.is_floating_point() or x.is_complex()))
        ctx.mark_non_differentiable(*without_grads)
        return tuple(results)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, tensors, needs_grad = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        gradients = [
            _Gradient(x, is_cut) if needed else None
            for x, is_cut, needed in zip(tensors, call.is_cut, needs_grad, strict=True)
        ]
        dim = call.tiled.dim
        for first, rows in call.bounds():
            tile = call.tile(tensors, first, rows)
            leaves = [
                gradient.leaf(x, dim, first, rows) if gradient else x.detach()
                for x, gradient in zip(tile, gradients, strict=True)
            ]
            with torch.enable_grad(), ExitStack() as stack:
                for context in call.contexts:
                    stack.enter_context(context())
                parts = call.run(leaves)
            roots = [
                (part, grad.narrow(dim, first, rows))
                for part, grad in zip(parts, grads, strict=True)
                if grad is not None and part.requires_grad
            ]
            if roots:
                torch.autograd.backward([part for part, _ in roots], [grad for _, grad in roots])
        return None, *(gradient and gradient.total() for gradient in gradients)


class _Gradient:
    """The gradient of one tensor: put together from tiles if it is cut, else their sum."""

    def __init__(self, x: Tensor, is_cut: bool) -> None:
        self._dtype, self._is_cut = x.dtype, is_cut
        self._total = torch.zeros_like(x) if is_cut else None

    def leaf(self, x: Tensor, dim: int, first: int, rows: int) -> Tensor:
        """x of one tile as an autograd leaf, whose gradient is added as soon as it is computed."""
        leaf = x.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(self._add, dim, first, rows))
        return leaf

    def _add(self, dim: int, first: int, rows: int, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if self._total is None:  # a sum over many tiles in 16 bits would drift
            self._total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        elif self._is_cut:
            self._total.narrow(dim, first, rows).copy_(grad)
        else:
            self._total += grad

    def total(self) -> Tensor | None:
        return None if self._total is None else self._total.to(self._dtype)


def _rows(inputs: Sequence[Tensor], dim: int) -> int:
    """The rows along `dim` of the first input that has this dimension."""
    for x in inputs:
        if x.dim() > dim:
            return x.shape[dim]
    shapes = [tuple(x.shape) for x in inputs]
    raise ValueError(f"no argument of a tiled module has a dim {dim}, got {shapes}")


def _has_rows(x: Tensor, dim: int, rows: int) -> bool:
    return x.dim() > dim and x.shape[dim] == rows


def _refuse_without_rows(parts: Sequence[Tensor], dim: int, rows: int) -> None:
    for part in parts:
        if not _has_rows(part, dim, rows):
            raise NotImplementedError(
                f"a tiled module must return rows along dim {dim}, as many as it gets: "
                f"{rows} rows gave {tuple(part.shape)}"
            )


def _current_autocast(device: str) -> MakeContext:
    """A function that gives the current autocast context, for the backward."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    state = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, *state, torch.is_autocast_cache_enabled())
