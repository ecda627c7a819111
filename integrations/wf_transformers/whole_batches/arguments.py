"""What a call with a whole batch may hold, and what the model may return for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends.parallel import slices_of_mask
from wf_transformers.calls import (
    CACHES,
    ON_ONE_PROCESS,
    PARTIAL_STATES,
    parameter_names,
    takes_any_keyword,
    tokens_of,
)
from wf_transformers.documents import MASK_WORDS, mask_words
from wf_transformers.models import Head, outermost

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What collators without padding give to flash attention."""
INSTEAD = (
    "in a loop of your own cut batches by shard_batch(batch, labels_are_shifted=...), of a "
    "SequenceParallel or of DeepSpeed's engine.wallfacer, and make a loss of your own"
)


def argument_names(model: nn.Module) -> list[str]:
    """What a model's arguments are called, in order; those of the model inside a wrapper that
    passes on whatever it gets, as some of PEFT's do."""
    names, inside = parameter_names(model), outermost(model)
    passes_on = names[:1] == ["args"] and model not in inside
    return argument_names(inside[0]) if passes_on and inside else names


def seqlen_of(given: Mapping[str, Any]) -> int:
    tokens = tokens_of(given)
    if tokens is None:
        raise ValueError(f'the model was called without "input_ids", with {sorted(given)}')
    return tokens.shape[1]


def is_by_token(key: str, value: Any, seqlen: int) -> bool:
    """Whether an argument is (b, S, ...) and so has to be cut; a mask that is not gets refused."""
    tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seqlen
    return key in (*MASK_WORDS, "attention_mask") or tokens


def keep_padding_in_range(model: nn.Module, local: dict[str, Any], seqlen: int) -> None:
    """Positions of our padding may lie beyond a position table; no valid token sees them."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and seqlen <= limit and "position_ids" in local:
        local["position_ids"] = local["position_ids"].clamp(max=limit - 1)


def logits_of(model: nn.Module, output: Any, rows: int) -> Tensor:
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


def unknown_labels(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} was called with labels, and is none of transformers' causal or "
        f"masked language models, of which we know how labels and the loss are meant; {INSTEAD}"
    )


def refuse_arguments(given: Mapping[str, Any]) -> None:
    for key in CACHES:
        if given.get(key) is not None:
            raise NotImplementedError(f"{key}: a KV cache cannot be spread; {ON_ONE_PROCESS}")
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict=False: leave it out, the loss goes into the output")


def refuse_overwriting(given: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse what the caller gave in a shape that cannot be cut, where we give it, too."""
    lost = [key for key in given if key in ours and key != "use_cache" and given[key] is not None]
    if lost:
        found = ", ".join(f"{key} {_describe(given[key])}" for key in lost)
        raise ValueError(
            f"{found} would be overwritten by what this rank's tokens need: only tensors (b, S) "
            "are cut with the batch; leave it out, or give it so"
        )


def _describe(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def refuse_unknown_words(model: nn.Module, names: list[str], words: Mapping[str, Any]) -> None:
    """Of a wrapper: what `forward_kwargs` gives must get to the model inside."""
    lost = [key for key in words if key not in names]
    if lost and not isinstance(model, PreTrainedModel) and not takes_any_keyword(model):
        raise ValueError(
            f"{type(model).__name__}.forward takes no {', '.join(lost)}, which the model inside "
            f"must get: give it **kwargs and pass them on"
        )


def with_slices(given: dict[str, Any], head: Head) -> dict[str, Any]:
    """A dense mask of the whole sequence as slices; none for the model's own mask.

    It is (b, 1, S, S) as it is added to scores, or bool; or (b, S, S) as BERT takes it, 1 = seen.

    Raises:
        ValueError: if slices cannot say what it says; see `slices_of_mask`.
    """
    mask = given.get("attention_mask")
    dims = (4,) if head == "causal" else (3, 4)
    if not isinstance(mask, Tensor) or mask.dim() not in dims or mask.shape[-1] != mask.shape[-2]:
        return given
    mask = mask[:, None] != 0 if mask.dim() == 3 else mask
    rest = {key: value for key, value in given.items() if key != "attention_mask"}
    try:
        found, whole = slices_of_mask(mask), [(0, mask.shape[-1])]
    except ValueError as error:
        raise ValueError(f"attention_{error}") from None  # it begins with "mask"
    own = "causal" if head == "causal" else "full"
    is_own = found == {"q_ranges": whole, "k_ranges": whole, "attn_mask_types": [own]}
    return rest if is_own else rest | {**found}


def with_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """Packed documents that only `position_ids` tell of, as "cu_seqlens" (host integers) too.

    Raises:
        ValueError: if the samples of the batch have different documents.
    """
    positions = batch.get("position_ids")
    if positions is None or mask_words(batch):
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


def own_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the documents that flash attention was told of as "cu_seqlens"."""
    found = {key: value for key, value in given.items() if key not in VARLEN}
    borders = given.get(VARLEN[0])
    if isinstance(borders, Tensor) and found.get("cu_seqlens") is None:
        found["cu_seqlens"] = tuple(borders.to(torch.int64).tolist())
    return found
