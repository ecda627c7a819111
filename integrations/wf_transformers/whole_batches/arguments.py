"""Checks and conversions of the arguments and outputs of models called with whole batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends.parallel import mask_arguments, slices_of_mask
from wf_transformers.attention.documents import MASK_ARGUMENTS
from wf_transformers.batch import is_causal
from wf_transformers.calls import (
    CACHES,
    NOT_LOCAL,
    PARTIAL_STATES,
    parameter_names,
    required_tokens,
    takes_any_keyword,
)
from wf_transformers.families.media_table import OF_MEDIA
from wf_transformers.models import Head, outermost, windows_of
from wf_transformers.whole_batches.custom_loss import LossKind

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments for flash attention from collators without padding."""
CUSTOM_LOOP = (
    "in a loop of your own cut batches by shard_batch(batch, labels_are_shifted=...), of a "
    "SequenceParallel or of DeepSpeed's engine.wallfacer, and make a loss of your own"
)
UNKNOWN_LABELS = (
    "{} was called with labels, and is none of transformers' causal or masked language models, of "
    f"which we know how labels and the loss are meant; {CUSTOM_LOOP}"
)

WhichLogits = Literal["whole", "local", "hidden"]
"""What the output gets: logits of the whole batch, of this rank's tokens, or, if the caller did not
ask for them, `ShardedLogits`."""


@dataclass(slots=True)
class BatchCall:
    """One call with a whole batch: what the hooks inside and after the model know about it."""

    seqlen: int
    """Tokens without padding."""
    local: Mapping[str, Any]
    """This rank's part of the batch: "labels" (b, s_local), already shifted unless the head is a
    masked one; "cu_seqlens" with the padding as one more document."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step, if the caller counted them for the loss."""
    logits: WhichLogits
    loss: LossKind
    starts: Tensor | None = None
    """(b,) tokens of padding on the left, which were moved to the right before the cut, in a call
    for log-probabilities."""
    num_kept: int = 0
    """How many of the last tokens' logits are returned; 0: all."""
    hidden_states: bool = False
    """Whether the output must have hidden states."""
    head_was_called: bool = False
    """Whether the output embeddings gave logits of all ranks, for a custom loss."""


def argument_names(model: nn.Module) -> list[str]:
    """The parameter names of a model's forward, in order; for a wrapper with forward(*args, ...),
    as some of PEFT's, those of the model inside it."""
    names, models = parameter_names(model), outermost(model)
    takes_any = names[:1] == ["args"] and model not in models
    return argument_names(models[0]) if takes_any and models else names


def seqlen_of(arguments: Mapping[str, Any]) -> int:
    return required_tokens(arguments).shape[1]


def mask_of_ones(arguments: Mapping[str, Any]) -> Tensor:
    """The attention_mask (b, S) of a batch without padding."""
    tokens = required_tokens(arguments)
    return tokens.new_ones(tokens.shape[:2], dtype=torch.int64)


def has_row_per_token(key: str, value: Any, seqlen: int) -> bool:
    """Whether an argument must be cut: (b, S, ...), or any mask or labels (others are refused
    later)."""
    is_row_per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seqlen
    if key in OF_MEDIA:  # pixels of a patch may be as many as the tokens
        return False
    is_any = key in (*MASK_ARGUMENTS, "attention_mask") or (key == "labels" and value is not None)
    return is_any or is_row_per_token


def logits_of(model: nn.Module, output: Any, rows: int) -> Tensor:
    """The logits of a model's output; refuses others than of this rank's `rows` rows."""
    name = type(model).__name__
    if not isinstance(output, Mapping) or not isinstance(output.get("logits"), Tensor):
        fields = sorted(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise NotImplementedError(
            f'{name} returns {fields}: called with whole batches, a model must return "logits", '
            f"from which the loss is made; {CUSTOM_LOOP}"
        )
    refuse_other_rows(f"{name} returns logits", output["logits"], rows)
    if output.get("hidden_states") is not None:
        raise NotImplementedError(PARTIAL_STATES)
    return output["logits"]


def refuse_other_rows(source: str, logits: Tensor, rows: int) -> None:
    """Refuse logits without a row for each of this rank's `rows` tokens."""
    if logits.dim() < 3 or logits.shape[1] != rows:
        raise NotImplementedError(
            f"{source} {tuple(logits.shape)}, not a row for each of the {rows} tokens of this "
            "rank: what is made of these is not what one device makes of all tokens; "
            f"{CUSTOM_LOOP}"
        )


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    for key in CACHES:
        if arguments.get(key) is not None:
            raise NotImplementedError(f"{key}: {NOT_LOCAL[key]}")
    if arguments.get("return_dict") is False:
        raise NotImplementedError("return_dict=False: leave it out, the loss goes into the output")


def refuse_overwriting(arguments: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse arguments of the caller that were not cut and that `ours` would replace."""
    overwritten = {
        key: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        for key, x in arguments.items()
        if x is not None and key != "use_cache" and key in ours
    }
    if overwritten:
        described = ", ".join(f"{key} {x}" for key, x in overwritten.items())
        raise ValueError(
            f"{described} would be overwritten by what this rank's tokens need: only tensors "
            "(b, S) are cut with the batch; leave it out, or give it so"
        )


def refuse_lost_arguments(model: nn.Module, names: list[str], kwargs: Mapping[str, Any]) -> None:
    """Refuse a wrapper whose forward cannot pass `kwargs` to the model inside it."""
    lost = [key for key in kwargs if key not in names]
    if lost and not isinstance(model, PreTrainedModel) and not takes_any_keyword(model):
        raise ValueError(
            f"{type(model).__name__}.forward takes no {', '.join(lost)}, which the model inside "
            f"must get: give it **kwargs and pass them on"
        )


def with_slices(model: nn.Module, arguments: dict[str, Any], head: Head) -> dict[str, Any]:
    """The arguments with a dense mask replaced by slices, or by nothing if it is causal or full.

    A dense mask says all that is seen, so a causal one is no model's own beyond its window.

    Dense masks are (b, 1, S, S), bool or added to scores, or (b, S, S) for BERT, 1 = seen.
    """
    mask = arguments.get("attention_mask")
    dims = (4,) if head == "causal" else (3, 4)
    if not isinstance(mask, Tensor) or mask.dim() not in dims or mask.shape[-1] != mask.shape[-2]:
        return arguments
    mask = mask[:, None] != 0 if mask.dim() == 3 else mask
    others = {key: value for key, value in arguments.items() if key != "attention_mask"}
    try:
        slices = slices_of_mask(mask)
    except ValueError as error:
        raise ValueError(f"attention_{error}") from None  # the message begins with "mask"
    mask_type = "causal" if head == "causal" and is_causal(model) else "full"
    whole = [(0, mask.shape[-1])]
    default = {"q_ranges": whole, "k_ranges": whole, "attn_mask_types": [mask_type]}
    is_default = slices == default and all(mask.shape[-1] <= w for w in windows_of(model))
    return others if is_default else others | {**slices}


def with_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with "cu_seqlens" (host integers) added if its `position_ids` restart."""
    positions = batch.get("position_ids")
    if positions is None or mask_arguments(batch):
        return batch
    if bool((positions != positions[:1]).any()):
        raise ValueError(
            "position_ids differ between the samples of a batch: documents are shared by all "
            "samples; use a batch of 1, or leave position_ids out"
        )
    starts = torch.nonzero(positions[0] == 0).flatten().tolist()
    if not starts or starts[0] != 0:
        raise ValueError(
            f"position_ids must start at 0, got {int(positions[0, 0])}: this model takes whole "
            "batches and cuts them itself, without shard_batch"
        )
    return batch if len(starts) == 1 else batch | {"cu_seqlens": (*starts, positions.shape[1])}


def with_cu_seqlens(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with documents that are told for flash attention as "cu_seqlens"."""
    result = {key: value for key, value in arguments.items() if key not in VARLEN}
    borders = arguments.get(VARLEN[0])
    if isinstance(borders, Tensor) and result.get("cu_seqlens") is None:
        result["cu_seqlens"] = tuple(borders.to(torch.int64).tolist())
    mask = result.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask_arguments(result):
        return result
    return result | _numbered_documents(mask) if bool((mask > 1).any()) else result


def _numbered_documents(mask: Tensor) -> dict[str, Any]:
    """ "cu_seqlens" and the mask of valid tokens, from an attention_mask (b, S) such as 1 1 2 2 2 0
    of the collators that pack samples for axolotl and LLaMA-Factory: the number of a token's
    document, 0 at padding.
    """
    number = mask[0]
    falls = (number[1:] < number[:-1]) & (number[1:] != 0)
    if bool((mask != number).any()) or bool(falls.any()):
        raise ValueError(
            "attention_mask numbers documents, but not the same ones, 1 1 2 2 2 0, in every "
            "sample of the batch: documents are shared by all samples; use a batch of 1"
        )
    starts = 1 + torch.nonzero(number[1:] != number[:-1]).flatten()
    borders = (0, *starts.tolist(), len(number))
    return {"attention_mask": (mask != 0).to(mask.dtype), "cu_seqlens": borders}
