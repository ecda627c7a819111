"""The arguments of a forward: leaves that a graph takes, and containers that a forward fills."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# Types of arguments that export does not take: the graph has them as constants.
CONSTANTS = (complex, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
_INPUTS = (nn.Module, torch.Generator, torch.Size, Enum, int, float, str, type(None))
_MOVE_WEIGHTS = {"GroupOffloadingHook", "LayerwiseCastingHook", "CpuOffload"}  # classes of hooks


def register_containers() -> None:
    """Register the containers of the imported frameworks, such as key-value caches, with pytree.

    The entry points have the name of a framework, and a function that registers its containers.
    Torch keeps them for the whole process; they cannot be unregistered.
    """
    for entry_point in entry_points(group="wallfacer.containers"):
        if entry_point.name in sys.modules:
            entry_point.load()()


def bind(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same call as (args, kwargs), with every argument where the forward's signature has it.

    Raises ValueError for arguments that the forward does not take.
    """
    bound = _bound(model, args, kwargs)
    return bound.args, bound.kwargs


def _bound(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bound to the signature of the function that a decorator wraps; if the decorator takes more
    arguments (transformers' `return_dict`), to the decorator's signature."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        try:
            return inspect.signature(model.forward, follow_wrapped=False).bind(*args, **kwargs)
        except (TypeError, ValueError):
            name = f"{type(model).__name__}.forward"
            raise ValueError(f"args and kwargs are not arguments of {name}: {error}") from None


def unsupported_input(leaves: list[Any]) -> str:
    """What the first leaf of the arguments is that no graph takes: a cache that pytree does not
    know, a sparse or a nested tensor; "" if there is none."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                return f"{leaf.layout} tensor"
        elif not isinstance(leaf, (*_INPUTS, *CONSTANTS)):
            return type(leaf).__name__
    return ""


def containers(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments' containers that a forward may fill: key-value caches, lists and dicts."""

    def is_mutable(value: Any) -> bool:
        return type(value) is not tuple and type(value) in pytree.SUPPORTED_NODES

    values = pytree.tree_leaves((args, tuple(kwargs.values())), is_leaf=is_mutable)
    return [value for value in values if is_mutable(value)]


def refill(container: Any, filled: Any) -> None:
    """Give a container of the inputs the contents of `filled`, another container of its type."""
    if isinstance(container, list | deque):
        container.clear()
        container.extend(filled)
    elif isinstance(container, dict):  # not update(), which transformers' outputs refuse
        for key in [key for key in container if key not in filled]:
            del container[key]
        for key, value in filled.items():
            container[key] = value
    else:
        vars(container).update(vars(filled))


@contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """On leaving, all modules have their attributes again, and lists and dicts their contents;
    methods with an `lru_cache` have forgotten their results.

    A forward may keep tensors, such as rotary tables, and those of a trace are fake.
    """
    saved = [(vars(module), dict(vars(module))) for module in model.modules()]
    values = [value for _, attributes in saved for value in attributes.values()]
    saved_values = [(value, copy.copy(value)) for value in values if type(value) in (dict, list)]
    try:
        yield
    finally:
        for container, contents in (*saved, *saved_values):
            refill(container, contents)
        for module in model.modules():
            for owner in (module, *type(module).__mro__):
                for value in vars(owner).values():
                    if isinstance(value, functools._lru_cache_wrapper):
                        value.cache_clear()


def refuse_hooks(model: nn.Module) -> None:
    """Raises ValueError for hooks that do what no graph can: those of diffusers that keep results
    of one call for later ones (`enable_cache`), and those that move or cast weights."""
    for path, module in model.named_modules():
        where = path or "the model itself"
        registry = vars(module).get("_diffusers_hook")
        for hook in registry.hooks.values() if registry else ():
            if hook._is_stateful:
                raise ValueError(
                    f"{type(hook).__name__} of {where} keeps results for later calls; "
                    "call disable_cache() first"
                )
            if type(hook).__name__ in _MOVE_WEIGHTS:
                raise ValueError(f"{type(hook).__name__} of {where} moves or casts weights")
        added = vars(module).get("_hf_hook") if "forward" in vars(module) else None
        for hook in getattr(added, "hooks", (added,)):  # a SequentialHook of accelerate has several
            if type(hook).__name__ in _MOVE_WEIGHTS or getattr(hook, "offload", False):
                raise ValueError(
                    f"accelerate's {type(hook).__name__} of {where} moves weights in the forward, "
                    "which no graph does. Call enable_model_cpu_offload() after autochunk(); for "
                    "weights that stay on the host there is HeteGen"
                )


def names_of_leaves(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, str]:
    """For each input of the exported forward, the name of the argument to which it belongs."""
    arguments = _bound(model, args, kwargs).arguments
    names = [name for name, value in arguments.items() for _ in pytree.tree_leaves(value)]
    return {f"leaves_{i}": name for i, name in enumerate(names)}


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of each module; a tied weight once for each module that reads it.

    For `torch.func.functional_call` with `tie_weights=False`. With its default, a module that
    stands in two places, such as T5's embedding, would keep its own weights in one of them.
    """
    for path, module in model.named_modules():
        options = {"recurse": False, "remove_duplicate": False}
        yield from module.named_parameters(path, **options)
        yield from module.named_buffers(path, **options)


def separated_from_weights(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The inputs, in which a weight becomes another tensor with its memory: else the graph would
    read the weight and not its input."""
    weight_ids = {id(weight) for weight in itertools.chain(model.parameters(), model.buffers())}
    replaced = dict[int, torch.Tensor]()

    def separate(x: torch.Tensor) -> torch.Tensor:
        return replaced.setdefault(id(x), x.detach()) if id(x) in weight_ids else x

    return pytree.tree_map_only(torch.Tensor, separate, (args, kwargs))
