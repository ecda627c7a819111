"""What takes tiled modules back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Handle(ExitStack):
    """Tiled modules of one model. `remove()`, or the end of a `with` block, takes it all back.

    Attributes:
        tiles: what runs, `Tiles`, with the counts that the ranks agreed on.
    """

    tiles: tuple[Any, ...] = ()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, for this instance, until `remove()`."""
        before = dict(vars(owner))
        setattr(owner, name, value)  # a property may keep it under another name
        for key, now in vars(owner).copy().items():
            if key not in before:
                self.callback(delattr, owner, key)
            elif before[key] is not now:
                self.callback(setattr, owner, key, before[key])

    def remove(self) -> None:
        """Take everything back, the last first. A second call does nothing."""
        self.close()
