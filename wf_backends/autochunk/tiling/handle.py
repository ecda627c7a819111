"""The handle that undoes the tiling of a model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Handle(ExitStack):
    """The tiling of one model. `remove()`, or the end of a `with` block, undoes it.

    Attributes:
        tiles: the `Tiles` that run, with the counts that the ranks agreed on.
    """

    tiles: tuple[Any, ...] = ()

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
        self.close()
