"""A model that is called with whole batches and computes its part of them.

For scripts that know nothing of sequence parallelism: two forward hooks of torch cut the batch
before the model and put the group's loss in its output. Nothing is replaced; both can be removed.
Without labels, and in evaluation, the output has the logits of the whole batch on every rank;
beside labels `whole_logits=` in the call says whether it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.parallel import token_loss
from wf_transformers.apply import scale_gradient
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import ON_ONE_PROCESS, PARTIAL_STATES, parameter_names, takes_any_keyword
from wf_transformers.fused import FUSED, fused_fields, own_words
from wf_transformers.models import head_of

WHOLE_LOGITS = "whole_logits"
INSTEAD = (
    "in a loop of your own cut batches by shard_batch(batch, labels_are_shifted=...), of a "
    "SequenceParallel or of DeepSpeed's engine.wallfacer, and make a loss of your own"
)


class Share(Protocol):
    """What the hooks ask of whoever trains the model: it averages gradients over all ranks."""

    @property
    def sp(self) -> SequenceParallel: ...

    def shard_batch(
        self, batch: Mapping[str, Any], pad_token_id: int = 0, labels_are_shifted: bool = False
    ) -> dict[str, Any]:
        """As `sp.shard_batch`."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the loss, x the ranks of a group."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook after the model needs to know of the batch that the hook before it cut."""

    seqlen: int
    """Tokens before padding."""
    rows: int
    """Tokens of this rank."""
    labels: Tensor | None
    """(b, s_local), where they are predicted."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step as the caller counted them on this rank's batches."""
    cu_seqlens: Sequence[int] | None
    """Documents, and the padding as one more."""
    whole: bool
    """Whether logits are to be of the whole batch."""
    fused: bool
    """Whether the model gives no logits, but values by token of the labels."""


class WholeBatchHooks:
    """The two hooks of one model.

    Args:
        whole_logits: whether logits are those of the whole batch in training beside labels, too.
    """

    def __init__(self, model: nn.Module, share: Share, whole_logits: bool = False) -> None:
        self._share, self._head, self._always_whole = share, head_of(model), whole_logits
        self._names = parameter_names(model)
        self._call: Call | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Take both hooks off the model."""
        for handle in self._handles:
            handle.remove()

    @eager
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = own_words(dict(zip(self._names, args, strict=False)) | kwargs)
        wanted = given.pop(WHOLE_LOGITS, self._always_whole or not model.training)
        whole = wanted or given.get("labels") is None
        _refuse(given)
        if given.get("labels") is not None and self._head == "other":
            raise NotImplementedError(_unknown_labels(model))
        seqlen = _seqlen(given)
        batch = with_documents({k: v for k, v in given.items() if _by_token(k, v, seqlen)})
        given = {k: v for k, v in given.items() if k not in batch}
        masked = self._head == "masked"
        local = self._share.shard_batch(batch, labels_are_shifted=masked)
        rows, num_items = _num_rows(local), given.pop("num_items_in_batch", None)
        labels, fused = local.get("labels"), bool(given.get(FUSED))
        borders = local.get("cu_seqlens")
        self._call = Call(seqlen, rows, labels, num_items, borders, whole, fused)
        words = given | forward_kwargs(model, local)
        words |= {"shift_labels": labels} if fused else {}
        _refuse_unknown_words(model, self._names, words)
        return (), words

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        assert call is not None, "the hook before the model did not run"
        if call.fused:
            whole = partial(self._whole, call=call)
            return type(output)(**fused_fields(output, call.num_items, whole))
        logits = _logits(model, output, call.rows)
        fields = dict(output)
        if call.labels is not None:
            loss = self._training_loss if model.training else self._evaluation_loss
            fields["loss"] = loss(logits, call.labels, call.num_items)
        if call.whole:
            fields["logits"] = self._whole(logits, call)
        return type(output)(**fields)

    def _whole(self, x: Tensor, call: Call) -> Tensor:
        """(b, S, ...): rows of all ranks. A loss that every rank makes of them counts once."""
        sp = self._share.sp
        whole = sp.unshard(x, 1, call.cu_seqlens)
        scale_gradient(whole, sp.size)  # the mean over the world divides by it
        return whole[:, : call.seqlen]

    def _training_loss(
        self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None
    ) -> Tensor:
        """The loss of the group, the same on every rank of it, with the gradient of its share.

        The share is x size: the mean over the world makes the gradient of the loss of it.
        """
        sp = self._share.sp
        if num_items is None:
            share = self._share.loss(logits, labels)
        else:
            share = token_loss(logits, labels, num_items) * sp.size
        return sp.sum_over_ranks(share) / sp.size + (share - share.detach())

    def _evaluation_loss(
        self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None
    ) -> Tensor:
        """The loss of the batch, the same on every rank of the group.

        The Trainer of transformers 5 counts valid labels here too, and scales by the number of
        ranks itself.
        """
        sp = self._share.sp
        share = sp.loss(logits, labels)
        if num_items is not None:
            share = token_loss(logits, labels, num_items)
        return sp.sum_over_ranks(share)


def loss_only(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _num_rows(local: Mapping[str, Any]) -> int:
    return local["input_ids" if "input_ids" in local else "inputs_embeds"].shape[1]


def _by_token(key: str, value: Any, seqlen: int) -> bool:
    """Whether an argument is (b, S, ...) and so has to be cut."""
    tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seqlen
    return key == "cu_seqlens" or tokens


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
