"""The ways in which a function of a framework is replaced, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class InPlaceOfTorchAttention(TorchFunctionMode):
    """Inside, on this thread, `attend` is called where torch's attention is, with its arguments.

    Args:
        attend: takes and gives what `scaled_dot_product_attention` does, (b, h, s, d).
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        called = self._attend if func is scaled_dot_product_attention else func
        return called(*args, **(kwargs or {}))


def set_until(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """owner.name = value, until `stack` closes."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


@contextmanager
def temporarily_replace(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of owner.name is `function(original, *args, **kwargs)`; then all is as before.

    Args:
        owner: a module, a class or an object.
        name: one that `owner` may lack; `original` is None then.
    """
    original = getattr(owner, name, None)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    if original is not None:
        functools.update_wrapper(replacement, original)
    with ExitStack() as stack:
        set_until(stack, owner, name, replacement)
        yield
