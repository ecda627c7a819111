"""`autochunk`: makes a model's forward pass run slice by slice where that saves memory."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.utils import _pytree as pytree

from wf_backends._validation import of_type
from wf_backends.autochunk.graph import (
    Budget,
    bind,
    checked_budget,
    computes_itself,
    containers,
    layout,
    planning_lock,
    refill,
    register_containers,
    unsupported_input,
)
from wf_backends.autochunk.plan import ChunkPlan
from wf_backends.autochunk.planning import Planned, find_plan
from wf_backends.autochunk.tiling import TrainingPlan, plan_training, tile_training

SMALL_INPUT_RATIO = 16  # inputs this many times smaller than planned ones run unchunked
MAX_PLANS = 32  # that are kept: a plan and its graph take megabytes, 20 for a Llama of 32 layers
_PLAIN = (bool, int, float, str, torch.dtype)
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_OF_COMPILERS = {"_is_torch_compile", "_compiled_call_impl", "_compile_kwargs"}  # by Lightning
_NOT_READ = {*_OF_EVERY_MODULE, *_OF_COMPILERS, "forward", "explain"}


def autochunk(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
    plan: ChunkPlan | TrainingPlan | None = None,
) -> ChunkedModel:
    """Returns the model with its forward in slices, so that its activations fit `max_memory`.

    AutoChunk, arXiv 2401.10652. `args` and `kwargs` are example inputs: their shapes and types
    count, their values do not. The result has the model's class, and shares its parameters,
    buffers, hooks and state dict; the model itself is not changed. The result also has `plan`, the
    `ChunkPlan` of the last form of inputs, and `explain()`, the plan as text.

    Args:
        max_memory: bytes, a size such as "2GB", a share of what the activations need unchunked for
            these inputs (a float below 1), or None for the least within `max_slowdown`.
        max_slowdown: the largest share of the predicted time that slices may add.
        plan: a plan made before, for the same model and form of inputs, instead of a search.

    Inputs of another form are planned at their first call, within `max_memory` and `max_slowdown`
    also beside a `plan`. With gradients enabled the model runs unchunked, with a warning: slices
    save nothing for a backward pass.

    A model in training (`model.training`) is changed and returned itself: its modules are tiled
    with recomputation as a `TrainingPlan` says (see `plan_training`), until `remove()` is called.

    Raises:
        ValueError: for a budget that nothing fits (with the closest plan), an invalid size, a
            model that cannot be captured (with the reason), a plan of another model, or a model in
            training that is tiled already.
    """
    of_type("model", model, nn.Module, "a torch.nn.Module")
    of_type("args", args, tuple, "a tuple of the call's positional arguments, such as (x,)")
    of_type("kwargs", kwargs, Mapping | None, 'a dict such as {"input_ids": ids}')
    of_type("plan", plan, ChunkPlan | TrainingPlan | None, "a plan: ChunkPlan.from_json(text)")
    budget = checked_budget(max_memory, max_slowdown)
    if model.training:
        if isinstance(vars(model).get("plan"), TrainingPlan):
            raise ValueError("model is tiled by an earlier call: call model.remove() first")
        training = plan or plan_training(model, args, kwargs, budget.memory, budget.slowdown)
        return cast(ChunkedModel, tile_training(model, training))
    if isinstance(plan, TrainingPlan):
        raise ValueError("plan is one for training, and the model is not: call model.train() first")
    forward = ChunkedForward(model, budget, plan)
    chunked = cast(ChunkedModel, copy.copy(model))
    chunked.forward = partial(forward, chunked)
    signature = inspect.signature(model.forward)  # `generate` reads which arguments it may pass
    chunked.forward.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    chunked.explain = partial(_explain, chunked)
    forward.prepare(chunked, *bind(model, args, dict(kwargs or {})), is_first=True)
    return chunked


class ChunkedModel(nn.Module):
    """What `autochunk` returns, for type checkers: at run time it has the model's own class."""

    plan: ChunkPlan | TrainingPlan
    explain: Callable[[], str]
    remove: Callable[[], None]
    """Only of a model in training."""


class ChunkedForward:
    """The forward of a chunked model, with a plan and a graph for each form of inputs.

    The graph calls no modules: a linear is an operator on the weight that its module has at the
    call. Code that computes linears elsewhere (HeteGen) must replace weights, not forwards.
    """

    def __new__(cls, *_: Any) -> ChunkedForward:
        """An object of a class of its own: torch.compile limits how often it compiles a code."""
        call = FunctionType(cls.__call__.__code__.replace(), globals())
        own = {"__call__": call, "__code__": call.__code__}  # torch.export reads the latter
        return object.__new__(type(cls.__name__, (cls,), own))

    def __init__(self, model: nn.Module, budget: Budget, plan: ChunkPlan | None) -> None:
        register_containers()
        self._model = model  # for the signature of its forward, which torch.compile can read
        self._own_forward = vars(model).get("forward")  # which replaces the class's
        self._budget = budget
        self._plan = plan
        self._planned: dict[Any, Planned] = {}
        self._state = _state(model)
        self._elements = 0
        self._warned = set[str]()

    def __reduce__(self) -> tuple[Any, ...]:
        """Without graphs, which cannot be pickled: a copy plans again at its first call."""
        return ChunkedForward, (self._model, self._budget, self._plan)

    def _whole(self, chunked: ChunkedModel) -> nn.Module:
        """The model without slices, with the attributes that `chunked` has now."""
        model = copy.copy(chunked)
        del model.forward
        if self._own_forward is not None:
            model.forward = self._own_forward
        return model

    def __call__(self, chunked: ChunkedModel, *args: Any, **kwargs: Any) -> Any:
        run_whole = self._own_forward or partial(type(chunked).forward, chunked)
        args, kwargs = bind(self._model, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._runs_whole(chunked, leaves):
            return run_whole(*args, **kwargs)
        state = _state(chunked)
        if state != self._state:  # the model has changed since it was captured
            self._planned.clear()
            self._state = state
        planned = self._planned.get(_input_form(leaves, spec))
        weights = planned.captured.read_weights() if planned else None
        if planned is None or weights is None:  # a new form of inputs, or a model that was cast
            prepare: Any = torch.compiler.disable(self.prepare)
            planned = cast(Planned, prepare(chunked, args, kwargs))
            weights = planned.captured.read_weights()
        plan = planned.plan
        if not plan.regions and not plan.saved:  # a graph alone may save, too: it frees sooner
            return run_whole(*args, **kwargs)
        if has_global_hooks():
            self._warn(
                "hooks of all modules (torch.nn.modules.module.register_module_forward_hook and "
                "the like) do not see the modules inside a chunked model"
            )
        assert weights is not None
        outputs = planned.lowered.module(*weights, *leaves)
        output, filled = pytree.tree_unflatten(outputs, planned.captured.output_spec)
        for container, contents in zip(containers(args, kwargs), filled, strict=True):
            refill(container, contents)
        return output

    def prepare(
        self, chunked: ChunkedModel, args: tuple, kwargs: dict[str, Any], is_first: bool = False
    ) -> Planned:
        """Captures and plans the forward for inputs of this form; `args` and `kwargs` are bound.

        `is_first`: they are those given to `autochunk`, for which a plan that was passed was made.
        """
        model = self._whole(chunked)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if unknown := unsupported_input(leaves):
            raise ValueError(f"an argument is a {unknown}, which no graph takes")
        form = _input_form(leaves, spec)
        with planning_lock():
            known = self._planned.get(form)  # by another thread, or since torch.compile looked
            if known is not None and known.captured.read_weights() is not None:
                return known
            planned = find_plan(
                model, args, kwargs, self._budget, None, self._plan, must_be_known=is_first
            )
            FakeTensorMode.cache_clear()  # torch keeps what it has of every shape of inputs
            self._budget = self._budget.in_bytes(planned.plan.peak_before)
            while len(self._planned) >= MAX_PLANS:
                del self._planned[next(iter(self._planned))]  # the oldest one
            self._planned[form] = planned
        self._elements = max(self._elements, _elements(leaves))
        chunked.plan = planned.plan
        return planned

    def _runs_whole(self, model: nn.Module, leaves: list[Any]) -> bool:
        """Whether the model itself has to run: with gradients, for a decoding step after a planned
        prefill, or with an object that the model may fill but the graph cannot, such as a key-value
        cache of a type that pytree does not know."""
        inputs = (x for x in leaves if isinstance(x, torch.Tensor))
        tracked = (t.requires_grad for t in (*model.parameters(), *inputs))
        if torch.is_grad_enabled() and any(tracked):
            self._warn(
                "gradients are enabled: the model runs unchunked. Call it under torch.no_grad(), "
                "or set model.train() before autochunk() for tiles with recomputation"
            )
            return True
        if max(1, _elements(leaves)) * SMALL_INPUT_RATIO <= self._elements:
            return True
        unknown = unsupported_input(leaves)
        if unknown:
            self._warn(
                f"an argument is a {unknown}, which no graph takes: the model runs unchunked"
            )
        return bool(unknown)

    def _warn(self, text: str) -> None:
        """Warns once for each text."""
        if text not in self._warned:
            warnings.warn(text, stacklevel=5)
            self._warned.add(text)


def _explain(chunked: ChunkedModel) -> str:
    return chunked.plan.explain()


def _elements(leaves: list[Any]) -> int:
    """The number of elements of the first tensor: token ids, embeddings or an image. Masks and
    caches, which come later, also have the rows of earlier calls."""
    return next((x.numel() for x in leaves if isinstance(x, torch.Tensor)), 0)


def _input_form(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """What a graph depends on besides the model: the tensors' layouts, which of them are the same
    object, the values of all other inputs, and the state of autocast."""
    described = tuple(layout(x) if isinstance(x, torch.Tensor) else _value(x) for x in leaves)
    tensors = [x for x in leaves if torch.is_tensor(x)]
    same = tuple([x is y for y in tensors].index(True) for x in tensors)  # no ids: torch.compile
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )
    return str(spec), described, same, autocast  # torch before 2.8 cannot hash a spec


def _value(leaf: object) -> tuple[type, object]:
    """A key that distinguishes 1, 1.0 and True, and 0.0 and -0.0, which compare equal."""
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _state(model: nn.Module) -> list[Any]:
    """What a graph contains of the model besides the values of weights: its modules, their modes,
    other plain attributes and callable ones, such as diffusers' attention processors, forwards that
    replace a class's, the ids of inner modules' hooks, which torch never gives twice; which weights
    there are, which of them are one, and which are subclasses that compute their own products."""
    state: list[Any] = []
    first: dict[int, int] = {}  # the number of each weight by its id
    for module in model.modules():
        own = {k: _plain(x) for k, x in vars(module).items() if k not in _NOT_READ}
        state.append({name: x for name, x in own.items() if x is not None})
        if module is not model:
            state += module, vars(module).get("forward")
            state += *module._forward_pre_hooks, *module._forward_hooks
        for name, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is not None:
                number = first.setdefault(id(weight), len(first))
                state.append((name, number, computes_itself(weight)))
    return state


def _plain(value: object) -> object:
    """A number, a string or a callable object as it is, numbers and strings of a list or a dict as
    a tuple; None for all else."""
    if isinstance(value, _PLAIN) or callable(value):
        return value
    items: Any = [*value.values(), *value] if isinstance(value, dict) else value
    is_plain = isinstance(items, list | tuple) and all(isinstance(x, _PLAIN) for x in items)
    return (tuple(items) or None) if is_plain else None
