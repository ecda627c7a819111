"""What torch.compile leaves alone: it runs as Python, between the graphs around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(fn: Callable[P, T]) -> Callable[P, T]:
    """fn under `torch.compiler.disable`, from when the compiler is there.

    Decorating with torch's own would import the compiler, which takes about as long as torch
    itself, in every process that imports this package.
    """

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return fn(*args, **kwargs)
        outside: Any = torch.compiler.disable(fn)
        return outside(*args, **kwargs)

    return call
