"""The one way in which a function of a framework is replaced, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily_replace(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of owner.name is `function(original, *args, **kwargs)`; then all is as before.

    Args:
        owner: a module, a class or an object.
        name: one that `owner` may lack; `original` is None then.
    """
    original, own = getattr(owner, name, None), name in vars(owner)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    if original is not None:
        functools.update_wrapper(replacement, original)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
