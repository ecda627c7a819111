"""Replaces functions of a framework for a while, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch._C._nn import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class InPlaceOfTorchAttention(TorchFunctionMode):
    """On this thread, call `attend` instead of torch's `scaled_dot_product_attention`.

    Args:
        attend: with the parameters and result of `scaled_dot_product_attention`, (b, h, s, d).
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = self._attend if func is scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


def set_until(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set owner.name = value until `stack` closes."""
    if isinstance(getattr(type(owner), name, None), property):
        stack.callback(setattr, owner, name, getattr(owner, name))
    elif name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


@contextmanager
def temporarily_replace(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, owner.name(*args, **kwargs) calls `function(original, *args, **kwargs)`.

    Args:
        owner: a module, a class or an object.
        name: of an attribute that it has.
    """
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    with ExitStack() as stack:
        set_until(stack, owner, name, replacement)
        yield


def run_hooks_inside_peft(model: Any, undo: ExitStack) -> None:
    """Have PEFT's tuners call the model inside them: `BaseTuner.forward` calls the forward of that
    model, past its hooks."""
    for module in model.modules():
        if getattr(type(module).forward, "__module__", None) == "peft.tuners.tuners_utils":
            set_until(undo, module, "forward", partial(_call_inside, module))


def _call_inside(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    return tuner.model(*args, **kwargs)
