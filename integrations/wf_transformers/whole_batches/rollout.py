"""Generation with a model whose tokens are spread over ranks: every rank runs the whole model.

A KV cache cannot be spread. So a second tree of modules over the same parameters, made before the
model is attached, generates. The ranks of a sequence draw alike and so generate the same.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

from torch import nn

from wf_transformers.handle import Handle
from wf_transformers.models import outermost
from wf_transformers.whole_batches.fused import has_fused_head


class Rollout:
    """The whole model beside the one that is spread.

    Args:
        model: before it is attached.
    """

    def __init__(self, model: Any) -> None:
        shared = chain(model.parameters(), model.buffers())
        self._model, self._alone = model, deepcopy(model, {id(x): x for x in shared})
        for one in filter(has_fused_head, outermost(self._alone)):
            del one.forward  # it calls the forward of `model`

    def take_over(self, handle: Handle) -> None:
        """`model.generate` is the whole model's, until `handle` is removed."""
        handle.set(self._model, "generate", self.generate)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `generate` of the model alone gives, with the parameters as they are now."""
        for one, its in zip(self._alone.modules(), self._model.modules(), strict=True):
            _share(one, its)
        self._alone.generation_config = self._model.generation_config
        return self._alone.generate(*args, **kwargs)


def _share(one: nn.Module, its: nn.Module) -> None:
    """The same parameters, buffers and mode: a move to a device replaces buffers."""
    one._parameters, one._buffers, one.training = its._parameters, its._buffers, its.training
