"""What stands in a training output where logits are of one rank's tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

HIDDEN = (
    "these logits are of this rank's tokens only, and a mean over them is none of the batch: say "
    "model(**batch, whole_logits=True), or connect(..., whole_logits=True) or connect_trainer(..., "
    "whole_logits=True) once, for those of all ranks; whole_logits=False gives this rank's"
)


class LocalLogits:
    """Any use as a tensor is an error that says what to do.

    Left alone, it is a field of the output as any other, for what walks through outputs.
    """

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            _refuse()
        raise AttributeError(name)

    def _use(self, *_: object) -> Any:
        _refuse()

    @classmethod
    def __torch_function__(cls, *_: Callable[..., Any]) -> Any:
        _refuse()

    __getitem__ = __len__ = __float__ = __neg__ = _use
    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _use


def _refuse() -> NoReturn:
    raise NotImplementedError(HIDDEN)
