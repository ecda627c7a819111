"""A model that is called with whole batches and computes its part of them.

Two forward hooks of torch: one cuts the batch before the model, one puts the group's loss into its
output. They do not care which booster plugin wraps the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_colossalai.loss import group_loss, split_vocabulary
from wf_transformers import Application, forward_kwargs
from wf_transformers.calls import ON_ONE_PROCESS, PARTIAL_STATES

BATCH_KEYS = (
    "input_ids",
    "inputs_embeds",
    "labels",
    "position_ids",
    "token_type_ids",
    "attention_mask",
    "cu_seqlens",
)

SAME_SAMPLES = (
    "All ranks of a sequence-parallel group read the same samples: use prepare_dataloader of "
    "WallFacerPlugin, or of what wf_colossalai.apply returned"
)


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook after the model must know of the batch that the hook before it cut."""

    seqlen: int
    """Tokens before padding."""
    labels: Tensor | None
    """(b, s), shifted."""
    cu_seqlens: tuple[int, ...] | None
    """Documents, and the padding as one more."""


class TokenHooks:
    """Cuts ids and labels, and makes the loss, of a model with one output row per token.

    Args:
        model: the model; what wraps it is none of our business.
        application: what lets its attention know the documents of a call.
        causal: whether labels are to be shifted.
        tensor_parallel: the group that logits may be split over.
    """

    def __init__(
        self,
        model: nn.Module,
        application: Application,
        causal: bool,
        tensor_parallel: ProcessGroup | None = None,
    ) -> None:
        self._application, self._causal = application, causal
        self._tensor_parallel = tensor_parallel
        self._parameters = inspect.signature(type(model).forward).parameters
        self._call: Call | None = None
        before = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(self._after)
        for handle in (before, after):
            application.undo.callback(handle.remove)

    @property
    def _sp(self) -> SequenceParallel:
        return self._application.attention.sp

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        names = [name for name in self._parameters if name != "self"]
        given = dict(zip(names, args, strict=False)) | kwargs
        _refuse(given)
        batch = {k: given.pop(k) for k in BATCH_KEYS if given.get(k) is not None}
        local = shard_batch(self._sp, batch, self._causal)
        tokens = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
        self._call = Call(tokens.shape[1], local.get("labels"), local.get("cu_seqlens"))
        _keep_padding_in_range(model, local, tokens.shape[1])
        if isinstance(model, PreTrainedModel):
            _recompute_with_documents(model, self._application)
            return (), given | forward_kwargs(model, local)
        known = {k: v for k, v in local.items() if k in self._parameters and k != "labels"}
        return (), given | known | {"cu_seqlens": local.get("cu_seqlens")}

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        assert call is not None, "the hook before the model did not run"
        fields = {"logits": output} if isinstance(output, Tensor) else dict(output)
        if "logits" not in fields:  # not the last stage of a pipeline
            return None
        if fields.get("hidden_states") is not None:
            raise NotImplementedError(PARTIAL_STATES)
        logits = fields["logits"]
        if call.labels is not None:
            vocabulary = split_vocabulary(model, logits)
            loss = group_loss(self._sp, logits, call.labels, vocabulary, self._tensor_parallel)
            fields = {"loss": loss} | {k: v for k, v in fields.items() if k != "loss"}
        if not model.training:
            whole = self._sp.unshard(logits, 1, call.cu_seqlens)
            fields["logits"] = whole[:, : call.seqlen]
        make: Any = CausalLMOutput if isinstance(output, Tensor) else type(output)
        return make(**fields)


def shard_batch(sp: SequenceParallel, batch: dict[str, Any], causal: bool) -> dict[str, Any]:
    """`sp.shard_batch`, with a word on what to do if the ranks hold different batches."""
    with _same_samples():
        return sp.shard_batch(batch, labels_are_shifted=not causal)


def same_inputs(sp: SequenceParallel, kwargs: dict[str, Any]) -> None:
    """`sp.check_same`, with the same word."""
    with _same_samples():
        sp.check_same(kwargs)


@contextmanager
def _same_samples() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        error.add_note(SAME_SAMPLES)
        raise


def _refuse(given: dict[str, Any]) -> None:
    if given.get("past_key_values") is not None:
        raise NotImplementedError(f"past_key_values: a KV cache cannot be spread; {ON_ONE_PROCESS}")
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict=False: leave it out, the loss goes into the output")


def _keep_padding_in_range(model: nn.Module, local: dict[str, Any], seqlen: int) -> None:
    """Positions of our padding may lie beyond a position table; no valid token sees them."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and seqlen <= limit and "position_ids" in local:
        local["position_ids"] = local["position_ids"].clamp(max=limit - 1)


def _recompute_with_documents(model: PreTrainedModel, application: Application) -> None:
    """Give checkpointed layers back their documents, wherever checkpointing was switched on."""
    running = (m for m in model.modules() if getattr(m, "gradient_checkpointing", False))
    checkpoint = getattr(next(running, None), "_gradient_checkpointing_func", None)
    if checkpoint is not None and "context_fn" not in getattr(checkpoint, "keywords", {}):
        model.gradient_checkpointing_enable(application.checkpoint_kwargs)
