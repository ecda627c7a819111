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
    refusal = (
        f"torch.export of a model that calls sp.{fn.__name__} is not supported, since what a rank "
        "does follows from the other ranks: export the model without it, with torch's own "
        "attention on one process"
    )

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if _is_exporting():
            raise NotImplementedError(refusal)
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return fn(*args, **kwargs)
        outside = outside or torch.compiler.disable(fn)
        return outside(*args, **kwargs)

    _leave_alone(call, refusal)
    return call


def _leave_alone(fn: Any, why: str) -> None:
    """torch.compile breaks its graph at fn, and looks neither at its frames nor at their callees.

    Else the frame of `call`, which all have in common, is compiled anew for every fn and number of
    arguments, up to the compiler's limit.
    """
    fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, why
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(frames, "set_code_exec_strategy"):  # not in torch 2.6
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))


def refuse_transforms(call: str, instead: str, /, **tensors: Tensor) -> None:
    """Refuse tensors inside torch.vmap, torch.func or forward-mode differentiation, by name.

    Args:
        call: what does not go through them.
        instead: what to do.

    Raises:
        NotImplementedError: with both.
    """
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    differentiates = forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    for name, x in tensors.items():
        wrapped = functorch.is_functorch_wrapped_tensor(x)
        if wrapped or (differentiates and forward_ad.unpack_dual(x).tangent is not None):
            raise NotImplementedError(
                f"{call} under torch.vmap, torch.func or forward-mode differentiation (jvp) is not "
                f"supported, and {name} is inside one of them: {instead}"
            )
