"""Heads over the rows of all ranks: sequence and token classifiers, question answering, two heads.

Such a head picks or compares rows of the whole sequence, and its model makes the loss. So it is
called as it is, with the whole batch. The model inside, which has the layers, gets this rank's
part, and what it returns is brought together: the head and the loss are then those of one device,
alike on every rank. Where the head begins with a linear of every row (`score`, a few numbers a
token), what that gives is brought together instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import (
    HIDDEN_STATES,
    PARTIAL_STATES,
    TOKENS,
    asks_for,
    by_name,
    parameter_names,
    takes_any_keyword,
)
from wf_transformers.documents import mask_words
from wf_transformers.draws import RankDraws, WholeNoise
from wf_transformers.families.media import media_of
from wf_transformers.families.stacks import stacks_of, whole_rows
from wf_transformers.handle import Handle, recorded
from wf_transformers.models import head_of, outermost, token_model
from wf_transformers.whole_batches.arguments import (
    is_by_token,
    keep_padding_in_range,
    refuse_arguments,
    refuse_overwriting,
    seqlen_of,
    with_documents,
)

Words = dict[str, Any]
BY_ROW = ("score", "qa_outputs")
"""Linears that heads of these names apply to every row, first of all."""
SPANS = ("start_positions", "end_positions")
PADDED_SPANS = (
    "attention_mask has padding, and the loss of start_positions and end_positions is over the "
    "logits of padding too, which here are not those of one device: give samples of one length"
)


def head_is_over_all_rows(model: nn.Module) -> bool:
    """Whether every Hugging Face model in `model` has a head that is none of a language model."""
    found = outermost(model)
    return bool(found) and all(_has_such_head(one) for one in found)


def _has_such_head(model: PreTrainedModel) -> bool:
    if head_of(model) != "other" or stacks_of(model) or media_of(model) is not None:
        return False
    inner = token_model(model)
    return inner is not model and "input_ids" in parameter_names(inner)


class HeadHooks:
    """The hooks of one such model; `handle.remove()` takes them off.

    Args:
        model: a Hugging Face model with such a head, attached by `handle`.
        is_last: whether the head's part of the model is on this rank (the last stage of a
            pipeline): elsewhere nothing is brought together.
    """

    def __init__(
        self, model: PreTrainedModel, handle: Handle, is_last: Callable[[], bool] = lambda: True
    ) -> None:
        self._model, self._handle, self._is_last = model, handle, is_last
        self._inner: Any = token_model(model)
        self._draws, self._noise = RankDraws(handle.sp.rank), WholeNoise()
        self._shape: torch.Size | tuple[int, ...] = ()
        self._told: Words = {}
        handle.whole_batches = True
        with recorded(handle):
            self.hooks = (
                model.register_forward_pre_hook(self._check, prepend=True, with_kwargs=True),
                self._inner.register_forward_pre_hook(self._cut, with_kwargs=True),
                _last_by_row(model, self._inner).register_forward_hook(self._join),
                self._inner.register_forward_hook(self._leave, always_call=True),
            )
        handle.hooks(*self.hooks)
        handle.attention.cut_by_heads.add(model)
        handle.undo.callback(handle.attention.cut_by_heads.discard, model)

    @eager
    def _check(self, model: Any, args: tuple[Any, ...], kwargs: Words) -> None:
        """Refuse what the head would take from one rank's rows."""
        given = by_name(parameter_names(model), args, kwargs)
        refuse_arguments(given)
        if asks_for(HIDDEN_STATES, model, given):
            raise NotImplementedError(PARTIAL_STATES)
        mask = given.get("attention_mask")
        padded = isinstance(mask, Tensor) and not bool(mask.all())
        if padded and any(given.get(key) is not None for key in SPANS):
            raise NotImplementedError(PADDED_SPANS)
        if model.training and torch.is_grad_enabled():
            self._handle.compare_first(given)

    @eager
    def _cut(self, inner: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        """This rank's part of what the model inside is called with."""
        names, documents = parameter_names(inner), self._handle.attention.documents
        given = by_name(names, args, kwargs)
        key = next(key for key in TOKENS if given.get(key) is not None)
        self._shape = given[key].shape[: 2 if key == "inputs_embeds" else None]
        given = {k: self._flat(x) for k, x in given.items()}
        seqlen = seqlen_of(given)
        batch = {k: x for k, x in given.items() if x is not None and is_by_token(k, x, seqlen)}
        batch |= documents.current({})
        local = self._handle.shard_batch(with_documents(batch))
        keep_padding_in_range(inner, local, seqlen)
        words = forward_kwargs(self._model, local)
        self._told = mask_words(words)
        documents.replace(self._told)
        documents.expect(seqlen_of(local))
        rest = {k: x for k, x in given.items() if k not in batch}
        refuse_overwriting(rest, words)
        if takes_any_keyword(inner):
            known = {"cu_seqlens": None} | words
        else:
            known = {k: x for k, x in words.items() if k in names}
        self._draws.enter_for(inner, self._handle.sp, given[key].device)
        self._noise.enter(inner, seqlen_of(local), seqlen)
        return (), rest | known

    def _flat(self, x: Any) -> Any:
        """(b, S, ...) of (b, choices, S, ...), if the tokens are such."""
        extra = len(self._shape) - 2
        same = isinstance(x, Tensor) and x.shape[: len(self._shape)] == self._shape
        return x.flatten(0, extra) if same and extra else x

    @eager
    def _join(self, _: nn.Module, __: Any, output: Any) -> Any:
        """The rows of all ranks in place of this rank's. A loss of them counts once."""
        self._leave()
        if not self._is_last():
            return None
        rows = output if isinstance(output, Tensor) else output[0]
        flat = rows.view(-1, *rows.shape[-2:])
        whole = whole_rows(self._handle.sp, flat, self._shape[-1], **self._told)
        whole = whole.reshape(*self._shape, whole.shape[-1])
        if isinstance(output, Mapping):
            first = next(iter(output))
            return type(output)(**{**output, first: whole})
        return whole if isinstance(output, Tensor) else (whole, *output[1:])

    def _leave(self, *_: Any) -> None:
        self._draws.leave()
        self._noise.leave()


def _last_by_row(model: nn.Module, inner: nn.Module) -> nn.Module:
    """The last module that has a row for each token: what it returns is brought together."""
    found = [m for name, m in model.named_children() if name in BY_ROW and type(m) is nn.Linear]
    if found and not any(isinstance(child, nn.Dropout) for child in model.children()):
        return found[0]
    return inner.get_submodule("encoder") if getattr(inner, "pooler", None) is not None else inner
