"""`autochunk`: a model whose forward pass runs slice by slice where that saves memory."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from wf_backends._validation import of_type
from wf_backends.autochunk.plan import ChunkPlan
from wf_backends.autochunk.planning import Planned, find_plan, use_plan
from wf_backends.graph import (
    Budget,
    bind,
    checked_budget,
    containers,
    is_supported_input,
    layout,
    refill,
    register_containers,
)
from wf_backends.tiling import TrainingPlan, plan_training, tile_training

SMALL = 16  # calls whose first tensor has this many times fewer elements run the model itself


def autochunk(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
    plan: ChunkPlan | TrainingPlan | None = None,
) -> ChunkedModel:
    """The model with its forward pass in slices, so that its activations fit `max_memory`.

    AutoChunk, arXiv 2401.10652. `args` and `kwargs` are inputs of the form that will be given;
    their values do not matter. The result has the model's class, and shares its parameters,
    buffers, hooks and state dict; the model itself is not changed. Beyond that it has `plan`, the
    `ChunkPlan` of the last form of inputs, and `explain()`, the plan in words.

    Args:
        max_memory: bytes, a size such as "2GB", a share of what the activations need unchunked for
            these inputs (a float below 1), or None for the least within `max_slowdown`.
        max_slowdown: the largest share of the predicted time that slices may add.
        plan: a plan made before, for the same model and form of inputs, instead of a search.

    Inputs of another form are planned at their first call. With gradients enabled the model runs
    unchunked, with a warning: the slices of this plan keep nothing for a backward pass.

    A model in training (`model.training`) is itself returned, changed: its modules are tiled with
    recomputation as a `TrainingPlan` says (see `plan_training`), and `remove()` takes them back.

    Raises:
        ValueError: for a budget that nothing fits (with the closest plan), a size that is none, a
            model that cannot be captured (with the reason), or a plan of another model.
    """
    of_type("model", model, nn.Module, "a torch.nn.Module")
    of_type("args", args, tuple, "a tuple of the call's positional arguments, such as (x,)")
    of_type("kwargs", kwargs, Mapping | None, 'a dict such as {"input_ids": ids}')
    of_type("plan", plan, ChunkPlan | TrainingPlan | None, "a plan: ChunkPlan.from_json(text)")
    budget = checked_budget(max_memory, max_slowdown)
    if model.training:
        made = plan or plan_training(model, args, kwargs, budget.memory, budget.slowdown)
        return cast(ChunkedModel, tile_training(model, made))
    if isinstance(plan, TrainingPlan):
        raise ValueError("plan is one for training, and the model is not: call model.train() first")
    forward = ChunkedForward(model, budget, plan)
    chunked = cast(ChunkedModel, copy.copy(model))
    forward.prepare(chunked, *bind(model, args, dict(kwargs or {})))
    chunked.forward = partial(forward, chunked)
    signature = inspect.signature(model.forward)  # by which `generate` knows what it may give
    chunked.forward.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    chunked.explain = lambda: chunked.plan.explain()
    return chunked


class ChunkedModel(nn.Module):
    """What `autochunk` returns, for type checkers: the model's own class with these beside."""

    plan: ChunkPlan | TrainingPlan
    explain: Callable[[], str]
    remove: Callable[[], None]
    """Of a model in training."""


class ChunkedForward:
    """The forward of a chunked model: one compiled pass for each form of inputs.

    The graph has no modules: a linear is an operator on the weight that its module has at the call.
    Whoever wants linears computed elsewhere (HeteGen) does it in the weight, not in a forward.
    """

    def __init__(self, model: nn.Module, budget: Budget, plan: ChunkPlan | None) -> None:
        register_containers()
        self._model = model
        self._budget = budget
        self._plan = plan
        self._planned: dict[Any, Planned] = {}
        self._modules = _modules(model)
        self._elements = 0
        self._warned = set[str]()

    def __call__(self, chunked: ChunkedModel, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = bind(self._model, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._runs_whole(leaves):
            return self._model.forward(*args, **kwargs)
        modules = _modules(self._model)
        if modules != self._modules:  # what was captured is of a model that is no more
            self._planned.clear()
            self._modules = modules
        planned = self._planned.get(_form(leaves, spec))
        weights = planned.captured.read_weights() if planned else None
        if planned is None or weights is None:  # a new form of inputs, or a model that was cast
            planned = self.prepare(chunked, args, kwargs)
            weights = planned.captured.read_weights()
        if not planned.plan.saved:  # a plan without regions may save, too: the graph frees sooner
            return self._model.forward(*args, **kwargs)
        assert weights is not None
        outputs = planned.lowered.module(*weights, *leaves)
        output, filled = pytree.tree_unflatten(outputs, planned.captured.output_spec)
        for container, with_values in zip(containers(args, kwargs), filled, strict=True):
            refill(container, with_values)
        return output

    def prepare(self, chunked: ChunkedModel, args: tuple, kwargs: dict[str, Any]) -> Planned:
        """Captures and plans the forward for inputs of this form, bound as it has them."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._plan is not None:
            planned = use_plan(self._model, args, kwargs, self._plan)
        else:
            planned = find_plan(self._model, args, kwargs, self._budget)
            self._budget = self._budget.in_bytes(planned.plan.peak_before)
        self._planned[_form(leaves, spec)] = planned
        self._elements = max(self._elements, _elements(leaves))
        chunked.plan = planned.plan
        return planned

    def _runs_whole(self, leaves: list[Any]) -> bool:
        """Whether the model itself is to run: with gradients, for one decoding step after a planned
        prefill, or with an object that no graph is made for and that may be filled, such as a
        key-value cache of a type that pytree does not know."""
        given = (x for x in leaves if isinstance(x, torch.Tensor))
        tracked = (t.requires_grad for t in (*self._model.parameters(), *given))
        if torch.is_grad_enabled() and any(tracked):
            self._warn(
                "gradients are enabled: the model runs unchunked. Call it under torch.no_grad(), "
                "or set model.train() before autochunk() for tiles with recomputation"
            )
            return True
        if _elements(leaves) * SMALL <= self._elements:
            return True
        kinds = [type(leaf).__name__ for leaf in leaves if not is_supported_input(leaf)]
        if kinds:
            self._warn(
                f"an argument is a {kinds[0]}, which no graph takes: the model runs unchunked"
            )
        return bool(kinds)

    def _warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self._warned:
            warnings.warn(text, stacklevel=5)
            self._warned.add(text)


def _elements(leaves: list[Any]) -> int:
    """The elements of the first tensor: token ids, embeddings or an image. Masks and caches, which
    come later, have those of earlier calls too."""
    return next((x.numel() for x in leaves if isinstance(x, torch.Tensor)), 0)


def _form(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """What the graph depends on beside the model: shapes, types and devices of tensors, which of
    them are one, the values of all other inputs, and autocast."""
    described = tuple(layout(x) if isinstance(x, torch.Tensor) else _value(x) for x in leaves)
    first = dict[int, int]()
    same = tuple(first.setdefault(id(x), i) for i, x in enumerate(leaves) if torch.is_tensor(x))
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )
    return spec, described, same, autocast


def _value(leaf: object) -> tuple[type, object]:
    """1, 1.0 and True compare equal and are three values, 0.0 and -0.0 are two."""
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _modules(model: nn.Module) -> list[Any]:
    """What of the model is in the graph beside its weights: its modules, their modes, forwards of
    single instances, and the hooks of those inside, whose numbers are given once."""
    found: list[Any] = []
    for module in model.modules():
        found += module, module.training, vars(module).get("forward")
        found += () if module is model else (*module._forward_pre_hooks, *module._forward_hooks)
    return found
