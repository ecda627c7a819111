"""Heads over the rows of all ranks: sequence and token classifiers, question answering, two heads.

Such a head picks or compares rows of the whole sequence, and its model computes the loss. So the
model is called with the whole batch. Its inner model, which has the layers, gets this rank's part,
and its output is gathered: head and loss are then those of one device, the same on every rank. If
the head begins with a linear on every row (`score`, a few numbers per token), the linear's output
is gathered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_backends.parallel import mask_arguments
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import (
    Kwargs,
    by_name,
    parameter_names,
    refuse_partial_states,
    required_tokens,
    takes_any_keyword,
)
from wf_transformers.families.media_table import media_of
from wf_transformers.families.stacks import stacks_of, whole_rows
from wf_transformers.handle import Handle, recorded_changes
from wf_transformers.models import head_of, outermost, token_model
from wf_transformers.rng import RankRng, scale_noise
from wf_transformers.whole_batches.arguments import (
    has_row_per_token,
    refuse_arguments,
    refuse_overwriting,
    seqlen_of,
    with_documents,
)

LINEAR_HEADS = ("score", "qa_outputs")
"""Names of linears that are applied to every row before anything else of the head."""
SPAN_LABELS = ("start_positions", "end_positions")


def head_is_over_all_rows(model: nn.Module) -> bool:
    """Whether every Hugging Face model in `model` has a head, and not that of a language model."""
    models = outermost(model)
    return bool(models) and all(_has_head_over_rows(inner) for inner in models)


def _has_head_over_rows(model: PreTrainedModel) -> bool:
    if head_of(model) != "other" or stacks_of(model) or media_of(model) is not None:
        return False
    inner = token_model(model)
    return inner is not model and "input_ids" in parameter_names(inner)


class HeadHooks:
    """The hooks of one model with such a head, until `handle.remove()`.

    Args:
        model: a Hugging Face model, attached by `handle`.
        is_last: whether the head is on this rank (the last stage of a pipeline): elsewhere nothing
            is gathered.
    """

    def __init__(
        self, model: PreTrainedModel, handle: Handle, is_last: Callable[[], bool] = lambda: True
    ) -> None:
        self._model, self._handle, self._is_last = model, handle, is_last
        self._inner: Any = token_model(model)
        self._rng, self._noise = RankRng(handle.sp), ExitStack()
        self._tokens_shape: torch.Size | tuple[int, ...] = ()  # of the running call
        self._mask_kwargs: Kwargs = {}  # of the running call
        handle.whole_batches = True
        with recorded_changes(handle):
            handle.before(model, self._check, first=True)
            handle.before(self._inner, self._cut)
            handle.after(_gathered_module(model, self._inner), self._gather)
            handle.after(self._inner, self._leave, always=True)
        handle.attention.cut_by_heads.add(model)
        handle.undo.callback(handle.attention.cut_by_heads.discard, model)

    @eager
    def _check(self, model: Any, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        """Refuse arguments for which the head would need more than this rank's rows."""
        arguments = by_name(parameter_names(model), args, kwargs)
        refuse_arguments(arguments)
        refuse_partial_states(model, arguments)
        mask = arguments.get("attention_mask")
        padded = isinstance(mask, Tensor) and not bool(mask.all())
        if padded and any(arguments.get(key) is not None for key in SPAN_LABELS):
            raise NotImplementedError(
                "attention_mask has padding, and the loss of start_positions and end_positions is "
                "over the logits of padding too, which here are not those of one device: give "
                "samples of one length"
            )
        if model.training and torch.is_grad_enabled():
            self._handle.compare_first(arguments)

    @eager
    def _cut(self, inner: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Replace the arguments of the inner model by this rank's part."""
        names, documents = parameter_names(inner), self._handle.attention.documents
        arguments = by_name(names, args, kwargs)
        tokens = required_tokens(arguments)
        self._tokens_shape = tokens.shape[: 2 if tokens.is_floating_point() else None]
        arguments = {k: self._flatten_choices(x) for k, x in arguments.items()}
        seqlen = seqlen_of(arguments)
        present = {k: x for k, x in arguments.items() if x is not None}
        batch = {k: x for k, x in present.items() if has_row_per_token(k, x, seqlen)}
        batch |= documents.current({})
        local = self._handle.shard_batch(with_documents(batch))
        ours = forward_kwargs(self._model, local)
        self._mask_kwargs = mask_arguments(local)
        documents.replace(mask_arguments(ours))
        documents.expect(seqlen_of(local))
        others = {k: x for k, x in arguments.items() if k not in batch}
        refuse_overwriting(others, ours)
        if takes_any_keyword(inner):
            ours = {"cu_seqlens": None} | ours
        else:
            ours = {k: x for k, x in ours.items() if k in names}
        self._rng.enter(inner, tokens.device)
        scale_noise(self._noise, inner, seqlen_of(local), seqlen)
        return (), others | ours

    def _flatten_choices(self, x: Any) -> Any:
        """(b, choices, S, ...) -> (b choices, S, ...), for models of multiple choice."""
        shape = self._tokens_shape
        is_by_token = isinstance(x, Tensor) and x.shape[: len(shape)] == shape
        return x.flatten(0, len(shape) - 2) if is_by_token and len(shape) > 2 else x

    @eager
    def _gather(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Replace this rank's rows in the output by those of all ranks."""
        self._leave()
        if not self._is_last():
            return None
        rows = output if isinstance(output, Tensor) else output[0]
        flat = rows.view(-1, *rows.shape[-2:])
        whole = whole_rows(self._handle.sp, flat, self._tokens_shape[-1], **self._mask_kwargs)
        whole = whole.reshape(*self._tokens_shape, whole.shape[-1])
        if isinstance(output, Mapping):
            first_field = next(iter(output))
            return type(output)(**{**output, first_field: whole})
        return whole if isinstance(output, Tensor) else (whole, *output[1:])

    def _leave(self, *_: Any) -> None:
        self._rng.leave()
        self._noise.close()


def _gathered_module(model: nn.Module, inner: nn.Module) -> nn.Module:
    """The last module with a row for each token; before dropout, which must draw for all rows."""
    children = dict(model.named_children())
    linears = [m for name, m in children.items() if name in LINEAR_HEADS and type(m) is nn.Linear]
    if linears and not any(isinstance(child, nn.Dropout) for child in children.values()):
        return linears[0]
    if getattr(inner, "pooler", None) is None:
        return inner
    layers = [x for x in inner.children() if isinstance(x, nn.ModuleList)]  # GTE, Nomic BERT
    return layers[-1][-1] if layers else inner.get_submodule("encoder")
