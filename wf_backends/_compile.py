"""What torch.compile leaves alone: it runs as Python, between the graphs around it. And what no
transform of torch may go through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # not in torch 2.6

P = ParamSpec("P")
T = TypeVar("T")


def eager(fn: Callable[P, T]) -> Callable[P, T]:
    """fn under `torch.compiler.disable`, from when the compiler is there.

    Decorating with torch's own would import the compiler, which takes about as long as torch
    itself, in every process that imports this package.
    """
    outside: Any = None  # fn as the compiler leaves it alone, once it is there

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if _is_exporting():
            raise NotImplementedError(
                f"torch.export of a model that calls sp.{fn.__name__} is not supported, since what "
                "a rank does follows from the other ranks: export the model without it, with "
                "torch's own attention on one process"
            )
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return fn(*args, **kwargs)
        outside = outside or torch.compiler.disable(fn)
        return outside(*args, **kwargs)

    return call


def refuse_transforms(name: str, x: Tensor) -> None:
    """Refuse a tensor inside torch.vmap, torch.func or forward-mode differentiation.

    Raises:
        NotImplementedError: with what to do instead.
    """
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = functorch.is_functorch_wrapped_tensor(x)
    if wrapped or forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"sp.attention under torch.vmap, torch.func or forward-mode differentiation (jvp) is "
            f"not supported, and {name} is inside one of them: give samples as the batch dimension "
            "of q, k, v, and take gradients by .backward() or torch.autograd.grad"
        )
