"""Calls of operators on drawn sizes, and the dimensions of their outputs that are sliced."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Draw:
    """Sizes and tensors from one seed. Sizes are 2 to 6 and the letters' own for a whole case."""

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
    """A call of `target`; `dims` of its output have a rule and all others are walls."""

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
