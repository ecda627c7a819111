"""SequenceParallel for ColossalAI's tensor subclass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wf_backends import SequenceParallel


class PlainSequenceParallel(SequenceParallel):
    """Converts ColossalAI's tensors to plain tensors.

    Under Gemini every activation is a ColoTensor, and so is every buffer allocated from one. Its
    operations do not write into views: gradients that are assembled in views would silently stay
    zero.
    """

    owner: Any = None
    """ColossalAI's plugin, kept alive: it destroys its process groups when it is collected."""

    def shard(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().shard(plain(x), *args, **kwargs)

    def unshard(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().unshard(plain(x), *args, **kwargs)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().attention(plain(q), plain(k), plain(v), *args, **kwargs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(plain(logits), labels)


def plain(x: Tensor) -> Tensor:
    """Return x as a torch.Tensor without its subclass; autograd sees the same tensor."""
    if type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
