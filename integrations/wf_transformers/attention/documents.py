"""State of the running forward: its documents or mask slices, and how many rows this rank has.

It is also known while a checkpointed or tiled layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from wf_backends.parallel import MASK_ARGUMENTS
from wf_backends.schedule import SLICE_ARGUMENTS
from wf_transformers.attention.blocks import BLOCKS

MaskKwargs = Mapping[str, Any]
OF_CALLS = (*MASK_ARGUMENTS, BLOCKS)
"""Keyword arguments of a call of a model that describe its mask."""

OUTSIDE = (
    "this call does not say which documents it has, but the batch or earlier calls did. Call the "
    "model that wf_transformers.apply was given, not a part of it, or give its layers the batch's "
    "cu_seqlens, as a tuple; where you checkpoint layers "
    "with a context_fn of your own, enter the contexts of handle.checkpoint_kwargs['context_fn']() "
    "too, so that recomputed layers find their documents"
)


NOT_CUT = (
    "every rank would take its rows for a part of one sequence. docs/transformers.md lists the "
    "encoders of images, videos and sounds that are cut; for another one name the modules between "
    "which rows are cut, wf_transformers.shard_between(handle, first, last)"
)


def of_call(kwargs: Mapping[str, Any]) -> MaskKwargs:
    """What a call's keyword arguments say about its mask."""
    return {key: kwargs[key] for key in OF_CALLS if kwargs.get(key) is not None}


class Scope(NamedTuple):
    mask_kwargs: MaskKwargs
    """cu_seqlens or the slices of a mask; empty without them. cu_seqlens are a tuple of borders for
    each sample where samples differ in length under full attention."""
    rows: int | None = None
    """Rows of this rank, which attention must have. 0: the sequence was not cut. None: unknown."""
    seqlen: int | None = None
    """Tokens of the whole sequence, where ranks may have unequal shards."""


def by_sample(documents: MaskKwargs) -> MaskKwargs:
    """`documents`, or {"masks": those of each sample} where samples have borders of their own."""
    borders = documents.get("cu_seqlens")
    if isinstance(borders, tuple) and any(isinstance(x, tuple) for x in borders):
        return {"masks": [{"cu_seqlens": x} for x in borders]}
    return documents


class Documents:
    """A stack of scopes, for models that do not pass keyword arguments down to attention."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self.used = False
        """Whether any call or batch so far had documents or slices."""
        self.scoped = False
        """Whether every forward of the attached model pushes a scope."""

    def __deepcopy__(self, _: Any) -> Documents:
        """A copy of a model has its hooks, and so its documents."""
        return self

    def push(
        self, mask_kwargs: MaskKwargs, rows: int | None = None, seqlen: int | None = None
    ) -> None:
        self._scopes.append(Scope(mask_kwargs, rows, seqlen))
        self.used = self.used or bool(mask_kwargs)

    def pop(self, *_: Any) -> None:
        if self._scopes:  # empty if a hook failed before the hook that pushes
            self._scopes.pop()

    def replace(self, mask_kwargs: MaskKwargs) -> None:
        """Replace the running scope, when documents become known inside the forward."""
        self.pop()
        self.push(mask_kwargs)

    def expect(self, rows: int, seqlen: int | None = None) -> None:
        """Set how many rows this rank has, and the whole sequence, in the running scope."""
        if self._scopes:
            self._scopes[-1] = self._scopes[-1]._replace(rows=rows, seqlen=seqlen)

    @property
    def running(self) -> Scope | None:
        """The scope of the attached model that is being called; None if there is none."""
        return self._scopes[-1] if self._scopes else None

    def check_rows(self, layer: str, rows: int) -> None:
        """Refuse attention over rows that are not this rank's."""
        expected = self.running.rows if self.running else None
        if expected is not None and expected != rows:
            cut = f"{expected} were cut for this rank" if expected else "none were cut"
            raise NotImplementedError(f"{layer} attends over {rows} rows, and {cut}: {NOT_CUT}")

    @contextmanager
    def scope(self, *scope: Any) -> Iterator[None]:
        """Push a scope, with the fields of `Scope`, for all attention inside the block."""
        self.push(*scope)
        try:
            yield
        finally:
            self.pop()

    def current(self, kwargs: Mapping[str, Any]) -> MaskKwargs:
        """Documents or slices of one attention call: from its keyword arguments, else its scope."""
        if any(key in kwargs for key in OF_CALLS):
            return of_call(kwargs)
        if self.running:
            return self.running.mask_kwargs
        if self.used:
            raise ValueError(OUTSIDE)
        return {}

    def borders(self, layer: str) -> Sequence[int] | None:
        """The running documents' borders, for a layer that needs all tokens in their order."""
        mask_kwargs = self.current({})
        if SLICE_ARGUMENTS[0] in mask_kwargs or BLOCKS in mask_kwargs:
            raise NotImplementedError(
                f"{layer} needs tokens in their order, of which slices of a mask say nothing: take "
                "cu_seqlens, or a model of full attention alone"
            )
        return mask_kwargs.get("cu_seqlens")

    def recomputing(self) -> Callable[[], AbstractContextManager[None]]:
        """What makes contexts with the scope of the running forward, for its recomputation."""
        return partial(self.scope, *self.running) if self.running else nullcontext

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], ...]:
        """torch.utils.checkpoint's `context_fn`: recomputation runs in the scope of the forward."""
        return nullcontext(), self.recomputing()()
