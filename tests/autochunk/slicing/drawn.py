"""Calls of operators on drawn sizes, and the dimensions of their outputs that can be sliced."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map


class Draw:
    """Draws sizes and tensors from a seed. A letter has one size, of 2 to 6, in all of a case."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes: dict[str, int] = {}

    def size(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        return self.sizes.setdefault(name, self.random.randint(2, 6))

    def __call__(self, *shape: str | int) -> Tensor:
        """A float64 tensor; a letter stands for a drawn size."""
        sizes = [self.size(name) for name in shape]
        return torch.randn(sizes, generator=self.generator, dtype=torch.float64)

    def below(self, high: str | int, *shape: str | int) -> Tensor:
        """Integers in [0, high)."""
        sizes = [self.size(name) for name in shape]
        return torch.randint(0, self.size(high), sizes, generator=self.generator)


@dataclass(frozen=True)
class Case:
    """A call of `target`. Its output can be sliced along `dims`, and along no other dimension."""

    target: Callable[..., Any]
    dims: tuple[int, ...]
    build: Callable[[Draw], tuple[Any, ...]]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.target.__module__ or ''}.{getattr(self.target, '__name__', self.target)}"


def case(target: Any, dims: str, build: Callable[[Draw], tuple[Any, ...]], **kwargs: Any) -> Case:
    """`dims` as digits: "02" for dimensions 0 and 2."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return Case(target, tuple(map(int, dims)), build, kwargs)


def node_of(case: Case, draw: Draw) -> fx.Node:
    """The call as a node of a graph. `meta["val"]` is its output; each tensor among the arguments
    is a placeholder with its value in `meta["val"]`."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    args = tree_map(placeholder, case.build(draw))
    node = graph.call_function(case.target, args, dict(case.kwargs))
    values, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    node.meta["val"] = node.target(*values, **kwargs)
    return node


def value_of(node: fx.Node) -> Tensor:
    """A copy of a node's value: an operator may write into its argument."""
    return node.meta["val"].clone()
