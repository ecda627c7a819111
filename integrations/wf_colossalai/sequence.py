"""SequenceParallel for tensors as ColossalAI makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wf_backends import SequenceParallel


class PlainSequenceParallel(SequenceParallel):
    """Takes ColossalAI's tensor subclass for the tensor that it is.

    Under Gemini every activation is a ColoTensor, and so would be what is allocated like one. Its
    operations do not write into views: gradients that are put together piece by piece would
    stay zero without a word.
    """

    owner: Any = None
    """Stays alive as long as this does: a plugin of ColossalAI takes its process groups down when
    it is collected, whoever still uses them."""

    def shard(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().shard(plain(x), *args, **kwargs)

    def unshard(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().unshard(plain(x), *args, **kwargs)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().attention(plain(q), plain(k), plain(v), *args, **kwargs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(plain(logits), labels)


def plain(x: Tensor) -> Tensor:
    """The same tensor, and the same place in the graph, without its subclass."""
    if type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
