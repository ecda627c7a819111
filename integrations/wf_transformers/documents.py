"""Which packed documents the running forward has, also while a layer of it is recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Borders = Sequence[int] | None  # cu_seqlens as host integers; None is one document

OUTSIDE = (
    "this call does not say which documents it has, but earlier calls did. Call the model that "
    "wf_transformers.apply was given, not a part of it; with gradient checkpointing, call "
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=handle."
    "checkpoint_kwargs), so that recomputed layers find their documents"
)


class Documents:
    """A stack of scopes. Models that pass keyword arguments down to attention do not need it."""

    def __init__(self) -> None:
        self._scopes: list[Borders] = []
        self.used = False
        """Whether any call so far had documents."""

    def push(self, cu_seqlens: Borders) -> None:
        self._scopes.append(cu_seqlens)
        self.used = self.used or cu_seqlens is not None

    def pop(self) -> None:
        if self._scopes:  # there is none where a hook failed that ran before the one that pushes
            self._scopes.pop()

    def replace(self, cu_seqlens: Borders) -> None:
        """Change the running scope: for what becomes known after the model was entered."""
        self.pop()
        self.push(cu_seqlens)

    @contextmanager
    def scope(self, cu_seqlens: Borders) -> Iterator[None]:
        """The documents of all attention inside the block."""
        self.push(cu_seqlens)
        try:
            yield
        finally:
            self.pop()

    def current(self, kwargs: Mapping[str, Any]) -> Borders:
        """The documents of one attention call: its keyword argument, or else the running scope.

        Raises:
            ValueError: if documents have been in use and this call says nothing about them.
        """
        if "cu_seqlens" in kwargs:
            return kwargs["cu_seqlens"]
        if self._scopes:
            return self._scopes[-1]
        if self.used:
            raise ValueError(OUTSIDE)
        return None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], ...]:
        """torch.utils.checkpoint's `context_fn`: the recomputation sees what the forward saw."""
        if not self._scopes:
            return nullcontext(), nullcontext()
        return nullcontext(), self.scope(self._scopes[-1])
