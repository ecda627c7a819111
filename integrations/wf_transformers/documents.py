"""What the running forward has: its documents or slices of a mask, and how many rows a rank cut.

Both are known while a layer of it is recomputed, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from wf_backends.parallel import MASK_WORDS, mask_words

Words = Mapping[str, Any]
NONE: Words = MappingProxyType({})

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
    words: Words
    rows: int | None = None
    """That this rank cut, and attention may have; 0: none were cut. None: not known."""
    seqlen: int | None = None
    """Of the whole, where shards may be uneven."""


class Documents:
    """A stack of scopes. Models that pass keyword arguments down to attention do not need it."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self.used = False
        """Whether any call so far had documents or slices."""

    def push(self, words: Words) -> None:
        self._scopes.append(Scope(words))
        self.used = self.used or bool(words)

    def pop(self) -> None:
        if self._scopes:  # there is none where a hook failed that ran before the one that pushes
            self._scopes.pop()

    def replace(self, words: Words) -> None:
        """Change the running scope: for what becomes known after the model was entered."""
        self.pop()
        self.push(words)

    def expect(self, rows: int, seqlen: int | None = None) -> None:
        """Say how many rows this rank has of what attention may mix in the running scope."""
        if self._scopes:
            self._scopes[-1] = self._scopes[-1]._replace(rows=rows, seqlen=seqlen)

    @property
    def running(self) -> Scope | None:
        """The scope of a model that was attached and is being called; None outside of any."""
        return self._scopes[-1] if self._scopes else None

    def check_rows(self, layer: str, rows: int) -> None:
        """Refuse attention over rows that nobody cut.

        Raises:
            NotImplementedError: if the running scope expects another number.
        """
        wanted = self.running.rows if self.running else None
        if wanted is not None and wanted != rows:
            cut = f"{wanted} were cut for this rank" if wanted else "none were cut"
            raise NotImplementedError(f"{layer} attends over {rows} rows, and {cut}: {NOT_CUT}")

    @contextmanager
    def scope(
        self, words: Words, rows: int | None = None, seqlen: int | None = None
    ) -> Iterator[None]:
        """The documents or slices of all attention inside the block."""
        self.push(words)
        self._scopes[-1] = Scope(words, rows, seqlen)
        try:
            yield
        finally:
            self.pop()

    def current(self, kwargs: Mapping[str, Any]) -> Words:
        """Those of one attention call: its keyword arguments, or else the running scope.

        Raises:
            ValueError: if there have been some in use and this call says nothing about them.
        """
        if any(key in kwargs for key in MASK_WORDS):
            return mask_words(kwargs)
        if self.running:
            return self.running.words
        if self.used:
            raise ValueError(OUTSIDE)
        return NONE

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], ...]:
        """torch.utils.checkpoint's `context_fn`: the recomputation sees what the forward saw."""
        return nullcontext(), self.scope(*self.running) if self.running else nullcontext()
