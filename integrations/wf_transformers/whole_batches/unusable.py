"""What stands in an output where a tensor is not what one device would have."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import Tensor

from wf_transformers.calls import PARTIAL_STATES


class Unusable:
    """Any use as a tensor is an error that says what to do.

    Left alone, it is a field of the output as any other, for what walks through outputs.
    """

    WHY: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            self._use()
        raise AttributeError(name)

    @classmethod
    def _use(cls, *_: object) -> NoReturn:
        raise NotImplementedError(cls.WHY)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls._use()

    def __getitem__(self, key: Any) -> Any:
        self._use()

    def __truediv__(self, other: Any) -> Any:
        self._use()

    __len__ = __float__ = __neg__ = __add__ = __sub__ = __mul__ = _use
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _use


class LocalLogits(Unusable):
    """In training beside labels, where nobody asked for logits."""

    WHY = (
        "these logits are of this rank's tokens only, and a mean over them is none of the batch: "
        "say model(**batch, whole_logits=True), or connect(..., whole_logits=True) or "
        "connect_trainer(..., whole_logits=True) once, for those of all ranks; whole_logits=False "
        "gives this rank's"
    )


class LocalStates(Unusable):
    """In place of hidden states that a trainer asks for."""

    WHY = PARTIAL_STATES
