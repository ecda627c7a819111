"""A model that is called with whole batches and computes its part of them.

Two forward hooks of torch: one cuts the batch before the model, one puts the group's loss into its
output. Nothing is replaced; both can be removed. Without labels, and in evaluation, the output has
the logits of the whole batch on every rank; beside labels `whole_logits=` in the call says whether
it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_backends.parallel import token_loss
from wf_transformers.attach import scale_gradient
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import ON_ONE_PROCESS, PARTIAL_STATES, takes_any_keyword
from wf_transformers.fused import FUSED, fused_fields, own_words
from wf_transformers.handle import Handle
from wf_transformers.models import Head, head_of

WHOLE_LOGITS = "whole_logits"
INSTEAD = (
    "in a loop of your own cut batches by shard_batch(batch, labels_are_shifted=...), of a "
    "SequenceParallel or of DeepSpeed's engine.wallfacer, and make a loss of your own"
)


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook after the model needs to know of the batch that the hook before it cut."""

    seqlen: int
    """Tokens before padding."""
    local: Mapping[str, Any]
    """This rank's part: "labels" (b, s_local) where they are predicted, "cu_seqlens" with the
    padding as one more document."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step as the caller counted them on this rank's batches."""
    whole: bool
    """Whether logits are to be of the whole batch."""
    fused: bool
    """Whether the model gives no logits, but values by token of the labels."""


class WholeBatchHooks:
    """The two hooks of one model, whose gradients are averaged over all ranks of the job.

    Args:
        handle: what attached the model; its `remove()` takes the hooks off, too.
        whole_logits: whether logits are those of the whole batch in training beside labels, too.
        head: what labels are. None: told by the model's class.
    """

    whole_without_labels = True
    """Whether logits are whole where no labels are passed, for a loss that the caller makes."""

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        whole_logits: bool = False,
        head: Head | None = None,
    ) -> None:
        self._handle, self._always_whole = handle, whole_logits
        self._head = head_of(model) if head is None else head
        _, *self._names = inspect.signature(type(model).forward).parameters  # without self
        self._call: Call | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        )
        handle.undo.callback(self.remove)

    def remove(self) -> None:
        """Take both hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @eager
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = own_words(dict(zip(self._names, args, strict=False)) | kwargs)
        labelled = given.get("labels") is not None
        wanted = given.pop(WHOLE_LOGITS, self._always_whole or not model.training)
        whole = wanted or (self.whole_without_labels and not labelled)
        _refuse(given)
        if labelled and self._head == "other":
            raise NotImplementedError(_unknown_labels(model))
        seqlen = _seqlen(given)
        batch = self._batch(given, seqlen)
        given = {k: v for k, v in given.items() if k not in batch}
        local = self._handle.shard_batch(batch, labels_are_shifted=self._head == "masked")
        _keep_padding_in_range(model, local, seqlen)
        num_items = given.pop("num_items_in_batch", None)
        self._call = Call(seqlen, local, num_items, whole, fused=bool(given.get(FUSED)))
        return (), self._words(model, given, local)

    def _batch(self, given: dict[str, Any], seqlen: int) -> dict[str, Any]:
        """Those arguments of a call that are cut."""
        return with_documents({k: v for k, v in given.items() if _by_token(k, v, seqlen)})

    def _words(
        self, model: nn.Module, given: dict[str, Any], local: dict[str, Any]
    ) -> dict[str, Any]:
        """What the model is called with: this rank's part, and what was given beside it."""
        words = given | forward_kwargs(model, local)
        words |= {"shift_labels": local.get("labels")} if given.get(FUSED) else {}
        _refuse_unknown_words(model, self._names, words)
        return words

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        assert call is not None, "the hook before the model did not run"
        if call.fused:
            whole = partial(self._whole, call=call)
            return type(output)(**fused_fields(output, call.num_items, whole))
        logits = _logits(model, output, _seqlen(call.local))
        fields = dict(output)
        if call.local.get("labels") is not None:
            fields["loss"] = self._loss(model, logits, call)
        if call.whole:
            fields["logits"] = self._whole(logits, call)
        return type(output)(**fields)

    def _whole(self, x: Tensor, call: Call) -> Tensor:
        """(b, S, ...): rows of all ranks. A loss that every rank makes of them counts once."""
        sp = self._handle.sp
        whole = sp.unshard(x, 1, call.local.get("cu_seqlens"))
        scale_gradient(whole, sp.size)  # the mean over the world divides by it
        return whole[:, : call.seqlen]

    def _loss(self, model: nn.Module, logits: Tensor, call: Call) -> Tensor:
        """The loss of the batch, the same on every rank of the group.

        Its gradient is that of this rank's share x size: the mean over the world makes the gradient
        of the loss of it.
        """
        size, share = self._handle.sp.size, self._share(model, logits, call)
        return self._handle.sp.sum_over_ranks(share) / size + (share - share.detach())

    def _share(self, model: nn.Module, logits: Tensor, call: Call) -> Tensor:
        """This rank's share of the loss x size, float32 or wider.

        The Trainer of transformers 5 counts valid labels in evaluation too, and scales by the
        number of ranks itself.
        """
        sp, labels = self._handle.sp, call.local["labels"]
        if call.num_items is not None:
            return token_loss(logits, labels, call.num_items) * sp.size
        if model.training:
            return self._handle.loss(logits, labels)
        return sp.loss(logits, labels) * sp.size


def loss_only(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instead of the Trainer's `prediction_step`: logits that it drops are not brought together.

    A model without the hooks is called as ever.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments["prediction_loss_only"] and _takes_whole_batches(call.arguments["model"]):
        call.arguments["inputs"] = {**call.arguments["inputs"], WHOLE_LOGITS: False}
    return original(*call.args, **call.kwargs)


def _takes_whole_batches(model: nn.Module) -> bool:
    """Whether the hooks are on the model, or on one inside a wrapper."""
    before = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(isinstance(getattr(hook, "__self__", None), WholeBatchHooks) for hook in before)


def _seqlen(given: Mapping[str, Any]) -> int:
    for key in ("input_ids", "inputs_embeds"):
        if isinstance(given.get(key), Tensor):
            return given[key].shape[1]
    raise ValueError(f'the model was called without "input_ids", with {sorted(given)}')


def _by_token(key: str, value: Any, seqlen: int) -> bool:
    """Whether an argument is (b, S, ...) and so has to be cut; a mask that is not gets refused."""
    tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seqlen
    return key in ("cu_seqlens", "attention_mask") or tokens


def _keep_padding_in_range(model: nn.Module, local: dict[str, Any], seqlen: int) -> None:
    """Positions of our padding may lie beyond a position table; no valid token sees them."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and seqlen <= limit and "position_ids" in local:
        local["position_ids"] = local["position_ids"].clamp(max=limit - 1)


def _logits(model: nn.Module, output: Any, rows: int) -> Tensor:
    """The logits of a model's output, which must be of this rank's rows, as nothing else is."""
    name = type(model).__name__
    if not isinstance(output, Mapping) or not isinstance(output.get("logits"), Tensor):
        found = sorted(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise NotImplementedError(
            f'{name} returns {found}: called with whole batches, a model must return "logits", '
            f"from which the loss is made; {INSTEAD}"
        )
    logits: Tensor = output["logits"]
    if logits.dim() < 3 or logits.shape[1] != rows:
        raise NotImplementedError(
            f"{name} returns logits {tuple(logits.shape)}, not a row for each of the {rows} "
            f"tokens of this rank: what it makes of its tokens is not what one device makes of "
            f"all; {INSTEAD}"
        )
    if output.get("hidden_states") is not None:
        raise NotImplementedError(PARTIAL_STATES)
    return logits


def _unknown_labels(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} was called with labels, and is none of transformers' causal or "
        f"masked language models, of which we know how labels and the loss are meant; {INSTEAD}"
    )


def _refuse(given: Mapping[str, Any]) -> None:
    if given.get("past_key_values") is not None:
        raise NotImplementedError(f"past_key_values: a KV cache cannot be spread; {ON_ONE_PROCESS}")
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict=False: leave it out, the loss goes into the output")


def _refuse_unknown_words(model: nn.Module, names: list[str], words: Mapping[str, Any]) -> None:
    """Of a wrapper: what `forward_kwargs` gives must get to the model inside."""
    lost = [key for key in words if key not in names]
    if lost and not isinstance(model, PreTrainedModel) and not takes_any_keyword(model):
        raise ValueError(
            f"{type(model).__name__}.forward takes no {', '.join(lost)}, which the model inside "
            f"must get: give it **kwargs and pass them on"
        )


def with_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """Packed documents that only `position_ids` tell of, as "cu_seqlens" (host integers) too.

    Raises:
        ValueError: if the samples of the batch have different documents.
    """
    positions = batch.get("position_ids")
    if positions is None or "cu_seqlens" in batch:
        return batch
    if bool((positions != positions[:1]).any()):
        raise ValueError(
            "position_ids differ between the samples of a batch: documents are shared by all "
            "samples; use a batch of 1, or leave position_ids out"
        )
    starts = torch.nonzero(positions[0] == 0).flatten().tolist()
    if not starts or starts[0] != 0:
        raise ValueError(f"position_ids must start at 0, got {int(positions[0, 0])}")
    return batch if len(starts) == 1 else batch | {"cu_seqlens": (*starts, positions.shape[1])}
