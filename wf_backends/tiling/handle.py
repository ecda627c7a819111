"""What takes tiled modules back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self


class Handle:
    """Tiled modules of one model. `remove()`, or the end of a `with` block, takes it all back.

    Attributes:
        tiles: what runs, `Tiles`, with the counts that the ranks agreed on.
        undo: the steps that `remove()` takes, the last first.
    """

    def __init__(self, tiles: Sequence[Any] = ()) -> None:
        self.tiles, self.undo = tuple(tiles), ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, for this instance, until `remove()`."""
        before = dict(vars(owner))
        setattr(owner, name, value)  # a property may keep it under another name
        for key, now in vars(owner).copy().items():
            if key not in before:
                self.undo.callback(delattr, owner, key)
            elif before[key] is not now:
                self.undo.callback(setattr, owner, key, before[key])

    def remove(self) -> None:
        """Take everything back. A second call does nothing."""
        self.undo.close()

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Inside, an error takes back what was done so far."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
