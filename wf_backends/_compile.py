"""Functions that torch.compile does not trace: they run as plain Python between its graphs. And
checks against torch's transforms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # not in torch 2.6
_is_tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]

P = ParamSpec("P")
T = TypeVar("T")


def eager(fn: Callable[P, T], refusal: str = "") -> Callable[P, T]:
    """fn, at which torch.compile breaks its graph, and neither traces nor compiles what it calls.

    As `torch.compiler.disable`, which would import the compiler in every process that imports this
    package: that takes about as long as importing torch.

    Args:
        refusal: the error of torch.export and torch.jit.trace; empty: that for a function of `sp`.
    """
    refusal = refusal or (
        f"torch.export or torch.jit.trace of a model that calls sp.{fn.__name__} is not supported, "
        "since what a rank does follows from the other ranks: export the model without it, with "
        "torch's own attention on one process"
    )

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _is_exporting() or _is_tracing():
            raise NotImplementedError(refusal)
        return fn(*args, **kwargs)

    excluded: Any = call
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(excluded.__code__, frames._FrameExecStrategy(skip, skip))
        excluded._torchdynamo_disable, excluded._torchdynamo_disable_msg = True, refusal
    else:  # torch 2.6
        excluded = torch.compiler.disable(excluded)
    return excluded


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled models and layers run as plain Python, if a rank is a process: ranks that
    are threads would end it for each other."""
    if "torch._dynamo" not in sys.modules or not dist.is_initialized():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def refuse_transforms(call: str, instead: str, /, **tensors: Tensor) -> None:
    """Refuse tensors inside torch.vmap, torch.func or forward-mode differentiation, by name.

    Args:
        call: the call that these transforms do not support, for the error.
        instead: what to do instead, for the error.

    Raises:
        NotImplementedError: naming the call and the tensor.
    """
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    differentiates = forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    for name, x in tensors.items():
        wrapped = functorch.is_functorch_wrapped_tensor(x)
        batched = functorch.is_legacy_batchedtensor(x)  # by is_grads_batched of autograd.grad
        if wrapped or batched or (differentiates and forward_ad.unpack_dual(x).tangent is not None):
            raise NotImplementedError(
                f"{call} under torch.vmap, torch.func or forward-mode differentiation (jvp) is not "
                f"supported, and {name} is inside one of them: {instead}"
            )
