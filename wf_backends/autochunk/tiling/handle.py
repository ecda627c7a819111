"""The handle that undoes the tiling of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self


class Handle:
    """The tiling of one model. `remove()`, or the end of a `with` block, undoes it.

    A deep copy of the model has a deep copy of the handle, which undoes the copy's tiles.

    Attributes:
        tiles: the `Tiles` that run, with the counts that the ranks agreed on.
    """

    def __init__(self) -> None:
        self.tiles: tuple[Any, ...] = ()
        self._undo: list[Callable[[], Any]] = []

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Have `remove` call function(*args)."""
        self._undo.append(partial(function, *args))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set owner.name = value on this instance, until `remove()`."""
        attributes = dict(vars(owner))
        setattr(owner, name, value)  # a property may store it under another name
        for key, new_value in vars(owner).copy().items():
            if key not in attributes:
                self.callback(delattr, owner, key)
            elif attributes[key] is not new_value:
                self.callback(setattr, owner, key, attributes[key])

    def remove(self) -> None:
        """Undo everything, the last change first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
