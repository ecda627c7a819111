"""The arguments of a forward: what a graph takes of them, and what a forward fills."""

from __future__ import annotations

import copy
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

# Arguments that export does not take, and that never change: the graph has them as constants.
CONSTANTS = (complex, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
_TAKEN = (torch.Tensor, nn.Module, torch.Generator, torch.Size, Enum, int, float, str, type(None))


CONTAINERS = "wallfacer.containers"
"""Entry points: the name of a framework -> what tells pytree of its containers."""


def register_containers() -> None:
    """Have pytree know the containers of the frameworks that are loaded, such as key-value caches.

    Torch's registry is the process's, and there is no way back from it.
    """
    for one in entry_points(group=CONTAINERS):
        if one.name in sys.modules:
            one.load()()


def bind(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same call, with every argument where the forward's signature puts it.

    Raises ValueError for arguments that the forward does not take.
    """
    bound = _bound(model, args, kwargs)
    return bound.args, bound.kwargs


def _bound(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """By the signature of the function that a decorator wraps or, where the decorator takes more
    than that (transformers' `return_dict`), by its own."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        try:
            return inspect.signature(model.forward, follow_wrapped=False).bind(*args, **kwargs)
        except (TypeError, ValueError):
            name = f"{type(model).__name__}.forward"
            raise ValueError(f"args and kwargs are not arguments of {name}: {error}") from None


def is_known(leaf: object) -> bool:
    """Whether a graph can be made for an argument such as this; for a cache of a type that pytree
    does not know it cannot."""
    return isinstance(leaf, (*_TAKEN, *CONSTANTS))


def containers(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments' parts that a forward may fill: key-value caches, lists and dicts."""

    def may_change(value: Any) -> bool:
        kind = type(value)
        return kind is not tuple and kind in pytree.SUPPORTED_NODES

    found = pytree.tree_leaves((args, tuple(kwargs.values())), is_leaf=may_change)
    return [value for value in found if may_change(value)]


def refill(container: Any, filled: Any) -> None:
    """Gives a container of the inputs what the forward left in another of its type."""
    if isinstance(container, list | deque):
        container.clear()
        container.extend(filled)
    elif isinstance(container, dict):  # transformers' outputs are some that know no update()
        for key in [key for key in container if key not in filled]:
            del container[key]
        for key, value in filled.items():
            container[key] = value
    else:
        vars(container).update(vars(filled))


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Gives all modules back the attributes that they had, and lists and dicts what these held: a
    forward may keep tensors, such as rotary tables, and those of a trace are fake."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [(v, copy.copy(v)) for _, own in before for v in own.values() if type(v) in (dict, list)]
    try:
        yield
    finally:
        for now, then in (*before, *held):
            refill(now, then)


def names_of_leaves(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, str]:
    """What a user calls the arguments to which the inputs of the exported forward belong."""
    bound = _bound(model, args, kwargs).arguments
    names = [name for name, value in bound.items() for _ in pytree.tree_leaves(value)]
    return {f"leaves_{i}": name for i, name in enumerate(names)}


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each module's own parameters and buffers, once for each place where one is read.

    For `torch.func.functional_call` with `tie_weights=False`: by default it leaves others in a
    module that stands in two places, as T5's embedding does.
    """
    for path, module in model.named_modules():
        own = {"recurse": False, "remove_duplicate": False}
        yield from module.named_parameters(path, **own)
        yield from module.named_buffers(path, **own)


def apart_from_weights(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The inputs with other tensors in the place of weights, which the graph would read instead."""
    own = {id(weight) for weight in itertools.chain(model.parameters(), model.buffers())}
    found = dict[int, torch.Tensor]()

    def apart(x: torch.Tensor) -> torch.Tensor:
        return found.setdefault(id(x), x.detach()) if id(x) in own else x

    return pytree.tree_map_only(torch.Tensor, apart, (args, kwargs))
