"""What runs on fake tensors tell of tiles: the peak of a training step, and refusals.

A module is refused if it computes with the number of its rows, or keeps tensors: a tile has fewer
rows. The graph does not show where a number comes from, as in x / (len(x) - 1), or a branch on the
length. So the module also runs on the rows of a tile: it must run the same operators with the same
numbers as on all rows. Nor does the graph show that a module keeps a tensor of its call in an
attribute, such as an auxiliary loss, or in a list that it is given: this would be that of one tile.
Or that it finds a tensor in an attribute instead of among its arguments: this would get no
gradient, and be another one when the backward computes the tile again. Or what the backward of an
autograd function of its own computes.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from wf_backends.autochunk.graph import (
    CaptureError,
    as_capture_errors,
    experts_as_operators,
    fake_run,
    named_weights,
)
from wf_backends.autochunk.tiling.original import Original
from wf_backends.autochunk.tiling.tiled_call import CallInTiles, TiledCall
from wf_backends.autochunk.tiling.tiles import Tiles

aten = torch.ops.aten
COPY_OPERATORS = (aten.clone.default, aten.copy_.default, aten._unsafe_view.default)
"""Operators that a module may need for all rows and not for some, or the reverse."""
PRODUCTS = {aten.bmm.default: aten.mm.default}
"""A linear layer of a frozen weight calls one or the other, by the strides of its input."""
GRADIENTS_ARE_EXACT = ("torch", "deepspeed", "bitsandbytes", "liger_kernel")
"""Packages whose autograd functions have the gradients of what they compute (ZeRO 3's linears)."""


def training_peak(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The peak of live bytes of a forward and a backward, beyond weights, their gradients, inputs.

    The model runs as it is: with its tiles and its activation checkpointing. An output without a
    loss is summed. A weight's new gradient counts until it is added to that of earlier batches.

    Raises `CaptureError` if the model does not run on fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real_weights = dict(named_weights(model))
    fakes = {id(weight): _fake_weight(mode, weight) for weight in real_weights.values()}
    weights = {f"model.{name}": fakes[id(w)] for name, w in real_weights.items()}  # tied ones once
    args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    grads = [w.grad for w in weights.values() if w.grad is not None]
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = *weights.values(), *grads, *inputs
    with as_capture_errors(model, "be trained on fake tensors"):
        with torch.enable_grad(), fake_run(model, mode, known) as tracker:
            functional_call(_Step(model), weights, args, kwargs, tie_weights=False)
    return tracker.peak


class _Step(nn.Module):
    """A model whose call is its forward and backward: what checkpoints compute again in the
    backward has the fake weights, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> None:
        # No name holds the output, so that its logits are freed before the backward.
        _loss(self.model(*args, **kwargs)).backward()


def _fake_weight(mode: FakeTensorMode, weight: Tensor) -> Tensor:
    """A fake weight with a gradient of zeros, as after an earlier batch."""
    fake = mode.from_tensor(weight.detach()).requires_grad_(weight.requires_grad)
    if fake.requires_grad:
        with mode:
            fake.grad = torch.zeros_like(fake)
    return fake


def _loss(output: Any) -> Tensor:
    """output["loss"]; else the first tensor, if it is a scalar; else the sum of all tensors."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return output["loss"]
    outputs = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs:
        raise ValueError("nothing in the model's output has a gradient: are all weights frozen?")
    if outputs[0].dim() == 0:
        return outputs[0]
    return sum((x.sum() for x in outputs), torch.zeros(()))


def refuse_row_counts(
    model: nn.Module, tiles: Collection[Tiles], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse modules that would compute something else on their tiles.

    Raises `CaptureError`, also if the model or a module does not run.
    """
    if all(spec.loss for spec in tiles):
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    weights = {n: w for n, w in named_weights(model) if not isinstance(w, nn.Parameter)}
    # The model may change its buffers.
    buffers: dict[str, Tensor] = {name: mode.from_tensor(x) for name, x in weights.items()}
    with ExitStack() as stack:
        stack.enter_context(experts_as_operators(model))  # their numbers of tokens are no reason
        for spec in tiles:
            if not spec.loss:
                module = model.get_submodule(spec.module)
                compare = partial(_compare, TiledCall(_Watched(module), spec.dim, spec.tiles))
                hook = module.register_forward_pre_hook(compare, with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(as_capture_errors(model, "run on fake tensors"))
        with torch.no_grad(), fake_run(model, mode, ()):
            functional_call(model, buffers, args, dict(kwargs), tie_weights=False)


class _Watched(Original):
    """A module's forward that holds its arguments, to whose lists and dicts it may write, and the
    names of attributes that it changed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.changed: dict[str, None] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = {"what it is given": (args, kwargs)}
        held = _held(self.module, self.given)
        result = super().forward(*args, **kwargs)
        for name, values in _held(self.module, self.given).items():
            if not _same(values, held.get(name, [])):
                self.changed[name] = None
        return result


def _compare(
    tiled: TiledCall, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Compare what a module runs on all rows, on those of a tile, and on those of the last tile."""
    call, tensors = tiled.prepared(args, kwargs)
    refusal = f"{type(module).__name__} cannot be tiled:"
    whole = _operators(call, tensors, call.rows)
    if whole.finds_tensors:
        raise CaptureError(f"{refusal} it computes with a tensor that it is not given")
    if function := _own_function(call, tensors):
        raise CaptureError(f"{refusal} its backward is that of {function}, which has no rule")
    for rows in {rows for _, rows in call.bounds()}:
        if _operators(call, tensors, rows).calls != whole.calls:
            raise CaptureError(f"{refusal} it computes with the number of its rows")
    names = cast(_Watched, tiled.fn).changed
    if names or whole.keeps_tensors:
        where = ", ".join(names) or "a place outside its results"
        raise CaptureError(f"{refusal} it keeps a value of each call in {where}")


def _held(module: nn.Module, given: dict[str, Any]) -> dict[str, list[Any]]:
    """The tensors and numbers of what is `given`, and of each attribute and buffer of all modules
    inside, also in lists and dicts."""
    values = given | {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in {**vars(part), **part._buffers}.items()
        if name not in ("_parameters", "_buffers")
    }
    return {name: [x for x in pytree.tree_leaves(v) if _is_value(x)] for name, v in values.items()}


def _is_value(x: object) -> bool:
    return isinstance(x, Tensor | int | float)


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether they are the same tensors and equal numbers."""
    pairs = zip(some, others, strict=False)
    same = (x is y or not (torch.is_tensor(x) or torch.is_tensor(y)) and x == y for x, y in pairs)
    return len(some) == len(others) and all(same)


def _own_function(call: CallInTiles, tensors: Sequence[Tensor]) -> str:
    """The name of an autograd function that the module calls, of a package that is not known to
    compute gradients; "" if there is none: rows that its backward mixes are not in the graph."""
    tile = [x.detach() for x in call.tile(tensors, 0, call.rows)]
    with torch.enable_grad():
        results = call.run([x.requires_grad_(x.is_floating_point()) for x in tile])
    nodes, seen = [x.grad_fn for x in results], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [read for read, _ in node.next_functions]
            function = getattr(node, "_forward_cls", torch.autograd.Function)
            if function.__module__.partition(".")[0] not in GRADIENTS_ARE_EXACT:
                return function.__name__
    return ""


def _operators(call: CallInTiles, tensors: Sequence[Tensor], rows: int) -> _Operators:
    torch.clear_autocast_cache()  # else autocast casts the weights for the first rows only
    tile = call.tile(tensors, 0, rows)
    with _Operators(tile) as operators:
        call.run(tile)
    torch.clear_autocast_cache()
    operators.look_for_kept()
    operators.calls.append(("results", *filter(_is_value, call.result_leaves)))
    return operators


class _Operators(TorchDispatchMode):
    """Records the operators that compute something, with the numbers that they are given, and
    whether one reads a tensor that was not `given`, or makes one that somebody keeps.

    Integers that the operator's schema declares are no such numbers: they are dimensions and sizes.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.finds_tensors = self.keeps_tensors = False
        self._known = set(_storages(given))
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if func.namespace != "prim" and not is_view and func not in COPY_OPERATORS:
            values = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | kwargs
            declared = {a.name for a in schema.arguments if "int" in str(a.type)}
            numbers = [
                (name, value)
                for name, value in values.items()
                if isinstance(value, int | float) and name not in declared
            ]
            self.calls.append((PRODUCTS.get(func, func), *numbers))
        if func is not aten.lift_fresh.default:  # of a number
            self.finds_tensors |= not self._known.issuperset(_storages((args, kwargs)))
        result = func(*args, **kwargs)
        made = _storages(result)
        self._made |= {key: StorageWeakRef(made[key]) for key in made.keys() - self._known}
        self._known.update(made)
        return result

    def look_for_kept(self) -> None:
        """Called when nobody should hold any more what operators made."""
        if not all(ref.expired() for ref in self._made.values()):
            gc.collect()
        self.keeps_tensors = not all(ref.expired() for ref in self._made.values())


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
    return {storage._cdata: storage for storage in (x.untyped_storage() for x in tensors)}
