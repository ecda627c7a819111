"""The first call of a model inside another by itself: for hidden states, and a loss in chunks.

A loop of one's own goes round the model that was attached, and round what knows whole batches. So
a call is compared as it is made: on a drawn batch, with the arguments that this one has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wf_backends._compile import eager
from wf_transformers.calls import TOKENS, has_tokens, parameter_names
from wf_transformers.comparison.drawn import drawn_tokens
from wf_transformers.comparison.first import FirstStep
from wf_transformers.documents import MASK_WORDS
from wf_transformers.families.stacks import stacks_of
from wf_transformers.handle import Handle
from wf_transformers.models import inner_models, outermost

UNKNOWN = "what inputs it takes is not known"


class InnerCalls:
    """Compares the models inside those that `handle` attached, when they are first called.

    Args:
        first: what knows how `model` was attached, the hooks of this among it.
    """

    def __init__(self, model: nn.Module, handle: Handle, first: FirstStep) -> None:
        self._handle, self._first = handle, first
        around = (one for one in outermost(model) if not stacks_of(one))
        self._due = {inner for one in around for inner in inner_models(one)}
        for inner in self._due:
            handle.hooks(inner.register_forward_pre_hook(self._before, with_kwargs=True))

    @eager
    def _before(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(parameter_names(inner), args, strict=False)) | kwargs
        by_itself = not self._handle.attention.documents.running and self._handle.first is not None
        trains = inner.training and torch.is_grad_enabled() and has_tokens(given)
        if by_itself and trains and inner in self._due:
            self._due -= set(inner.modules())
            self._compare(inner, [name for name, x in given.items() if x is not None])

    def _compare(self, inner: nn.Module, names: list[str]) -> None:
        handle = self._handle
        told = dict.fromkeys(name for name in MASK_WORDS if name in names)  # one document
        no_cache = {"use_cache": False} if "use_cache" in parameter_names(inner) else {}

        def call(words: Mapping[str, Any], alone: bool) -> Any:
            asked = {k: x for k, x in words.items() if alone or k in (*TOKENS, *names)}
            return inner(**no_cache | (asked if alone else told | asked))

        batch = drawn_tokens(inner, handle.sp)
        on = f"a drawn batch, with {', '.join(names)} alone as here"
        self._first.run(inner, handle, batch, UNKNOWN, on, handle.whole_batches, call)
