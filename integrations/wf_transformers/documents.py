"""What the running forward has: its packed documents, and how many rows a rank cut.

Both are known while a layer of it is recomputed, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

Borders = Sequence[int] | None  # cu_seqlens as host integers; None is one document

OUTSIDE = (
    "this call does not say which documents it has, but earlier calls did. Call the model that "
    "wf_transformers.apply was given, not a part of it; with gradient checkpointing, call "
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=handle."
    "checkpoint_kwargs), so that recomputed layers find their documents"
)


NOT_CUT = (
    "every rank would take its rows for a part of one sequence. Of models that take images or "
    "sounds, ViT is spread; for another encoder name the modules between which rows are cut, "
    "wf_transformers.shard_between(handle, first, last)"
)


class Scope(NamedTuple):
    borders: Borders
    rows: int | None = None
    """That this rank cut, and attention may have; 0: none were cut. None: not known."""
    seqlen: int | None = None
    """Of the whole, where shards may be uneven."""


class Documents:
    """A stack of scopes. Models that pass keyword arguments down to attention do not need it."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self.used = False
        """Whether any call so far had documents."""

    def push(self, cu_seqlens: Borders) -> None:
        self._scopes.append(Scope(cu_seqlens))
        self.used = self.used or cu_seqlens is not None

    def pop(self) -> None:
        if self._scopes:  # there is none where a hook failed that ran before the one that pushes
            self._scopes.pop()

    def replace(self, cu_seqlens: Borders) -> None:
        """Change the running scope: for what becomes known after the model was entered."""
        self.pop()
        self.push(cu_seqlens)

    def expect(self, rows: int, seqlen: int | None = None) -> None:
        """Say how many rows this rank has of what attention may mix in the running scope."""
        if self._scopes:
            self._scopes[-1] = self._scopes[-1]._replace(rows=rows, seqlen=seqlen)

    @property
    def rows(self) -> int | None:
        """What `expect` was told in the running scope; None outside of any."""
        return self._scopes[-1].rows if self._scopes else None

    @property
    def seqlen(self) -> int | None:
        """As `rows`."""
        return self._scopes[-1].seqlen if self._scopes else None

    def check_rows(self, layer: str, rows: int) -> None:
        """Refuse attention over rows that nobody cut.

        Raises:
            NotImplementedError: if the running scope expects another number.
        """
        wanted = self.rows
        if wanted is not None and wanted != rows:
            cut = f"{wanted} were cut for this rank" if wanted else "none were cut"
            raise NotImplementedError(f"{layer} attends over {rows} rows, and {cut}: {NOT_CUT}")

    @contextmanager
    def scope(
        self, cu_seqlens: Borders, rows: int | None = None, seqlen: int | None = None
    ) -> Iterator[None]:
        """The documents of all attention inside the block."""
        self.push(cu_seqlens)
        self._scopes[-1] = Scope(cu_seqlens, rows, seqlen)
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
            return self._scopes[-1].borders
        if self.used:
            raise ValueError(OUTSIDE)
        return None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], ...]:
        """torch.utils.checkpoint's `context_fn`: the recomputation sees what the forward saw."""
        if not self._scopes:
            return nullcontext(), nullcontext()
        return nullcontext(), self.scope(*self._scopes[-1])
