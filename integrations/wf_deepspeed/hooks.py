"""A model that is called with whole batches and computes its part of them.

For scripts that know nothing of sequence parallelism: two forward hooks of torch cut the batch
before the model and put the group's loss in its output. Nothing is replaced; both can be removed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wf_backends.loss import token_loss
from wf_deepspeed.component import WallFacer
from wf_transformers import forward_kwargs


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook after the model needs to know of the batch that the hook before it cut."""

    seqlen: int
    """Tokens before padding."""
    labels: Tensor | None
    """(b, s_local), shifted."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step as the caller counted them on this rank's batches."""


class WholeBatchHooks:
    """The two hooks of one model."""

    def __init__(self, model: nn.Module, component: WallFacer) -> None:
        self._component = component
        self._names = list(inspect.signature(model.forward).parameters)
        self._call: Call | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Take both hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        _refuse(given)
        seqlen = _seqlen(given)
        batch = with_documents({k: v for k, v in given.items() if _by_token(k, v, seqlen)})
        given = {k: v for k, v in given.items() if k not in batch}
        local = self._component.shard_batch(batch)
        self._call = Call(seqlen, local.get("labels"), given.pop("num_items_in_batch", None))
        return (), given | forward_kwargs(model, local)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        assert call is not None, "the hook before the model did not run"
        fields = dict(output)
        logits = fields["logits"]
        if call.labels is not None:
            loss = self._training_loss if model.training else self._evaluation_loss
            fields["loss"] = loss(logits, call.labels, call.num_items)
        if not model.training:
            fields["logits"] = self._component.sp.unshard(logits, dim=1)[:, : call.seqlen]
        return type(output)(**fields)

    def _training_loss(
        self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None
    ) -> Tensor:
        """This rank's share x size: DeepSpeed's mean over the world makes the loss of it."""
        if num_items is None:
            return self._component.loss(logits, labels)
        return token_loss(logits, labels, num_items) * self._component.sp.size

    def _evaluation_loss(self, logits: Tensor, labels: Tensor, _: object) -> Tensor:
        """The loss of the batch, the same on every rank of the group."""
        sp = self._component.sp
        return sp.sum_over_ranks(sp.loss(logits, labels))


def _seqlen(given: dict[str, Any]) -> int:
    for key in ("input_ids", "inputs_embeds"):
        if isinstance(given.get(key), Tensor):
            return given[key].shape[1]
    raise ValueError(f'the model was called without "input_ids", with {sorted(given)}')


def _by_token(key: str, value: Any, seqlen: int) -> bool:
    """Whether an argument is (b, S, ...) and so has to be cut."""
    tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seqlen
    return key == "cu_seqlens" or tokens


def _refuse(given: dict[str, Any]) -> None:
    if given.get("past_key_values") is not None:
        raise NotImplementedError(
            "past_key_values: a KV cache cannot be spread; generate without it"
        )
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict=False: leave it out, the loss goes into the output")


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
