"""The result of sp.shard_batch as the keyword arguments of a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from wf_backends.parallel import at_least_one
from wf_transformers.attach import is_applied
from wf_transformers.calls import parameter_names, takes_any_keyword, tokens_of
from wf_transformers.documents import mask_words
from wf_transformers.families.experts import COUNTED, has_router_loss
from wf_transformers.families.mixing import refuse_unspread, refuse_unspreadable
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.families.table import builds_masks
from wf_transformers.masks import silent_mask
from wf_transformers.models import outermost
from wf_transformers.registry import registered_for
from wf_transformers.whole_batches.own_loss import refuse_own_loss

# From 4.53 on, layers keep all keyword arguments when they are recomputed.
LAYERS_KEEP_KEYWORDS = find_spec("transformers.modeling_layers") is not None


def forward_kwargs(
    model: nn.Module, local_batch: Mapping[str, Any], *, num_valid: Tensor | int | None = None
) -> dict[str, Any]:
    """What to call `model(**...)` with, for this rank's share of a batch.

    Position ids and documents go along; the attention mask does not (documents say what it said).

    Args:
        model: what will be called; a wrapper is looked through by its `.module`.
        local_batch: what sp.shard_batch returned.
        num_valid: valid labels of the whole sequence-parallel group. With it, labels go along, and
            the loss of a ...ForCausalLM is this rank's share: over the ranks it sums up to the
            mean of one device, as sp.loss. Without it, labels stay behind, for sp.loss.

    Raises:
        ValueError: if documents or slices would get lost on the way, or padding would be seen.
        NotImplementedError: for a model that cannot be spread (see `refuse_unspreadable`), and with
            `num_valid` for one whose loss is not plain cross entropy.
    """
    model = _unwrap(model)
    if is_cut_inside(model):
        raise ValueError(
            f"{type(model).__name__} is cut inside: call it with the whole batch on every rank"
        )
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    kwargs = {k: v for k, v in local_batch.items() if k not in ("attention_mask", "labels")}
    if causal:
        silent = None if builds_masks(model) else _silent_mask(model, local_batch)
        kwargs |= {"attention_mask": silent, "use_cache": False}
    elif "attention_mask" in local_batch and not mask_words(local_batch):
        raise ValueError(
            "attention_mask gives samples of different lengths, and padding would be seen by full "
            "attention: give samples of one length, one sample, or pack them as documents"
        )
    _refuse_unspreadable(model)
    if any(has_router_loss(one) and is_applied(one) for one in outermost(model)):
        kwargs |= {COUNTED: local_batch.get("attention_mask")}
    if (told := mask_words(kwargs)) and not _carries_documents(model):
        raise ValueError(
            f"{type(model).__name__} of transformers {transformers.__version__} does not hand "
            f"{next(iter(told))} down to attention; call wf_transformers.apply(model, sp) once"
        )
    if num_valid is not None:
        refuse_own_loss(model)
        kwargs |= {"labels": local_batch["labels"], "shift_labels": local_batch["labels"]}
        kwargs["num_items_in_batch"] = at_least_one(num_valid)
    return kwargs


def _refuse_unspreadable(model: nn.Module) -> None:
    """As `apply` does, for models that it was not called on."""
    for one in outermost(model):
        attention = registered_for(one)
        if attention is not None and attention.sp.size > 1:
            refuse_unspreadable(one)
            refuse_unspread(one)


def _silent_mask(model: nn.Module, local_batch: Mapping[str, Any]) -> Tensor:
    tokens = tokens_of(local_batch)
    if tokens is None:
        raise ValueError(f'a batch needs "input_ids" (b, s), got the keys {sorted(local_batch)}')
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    dtype = torch.float64 if wide else torch.float32
    return silent_mask(tokens.shape[0], tokens.device, dtype)


def _unwrap(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    return _unwrap(inner) if isinstance(inner, nn.Module) else model


def _carries_documents(model: nn.Module) -> bool:
    """Whether cu_seqlens reach attention, in the forward and when a layer is recomputed.

    In a wrapper the Hugging Face models are asked, and without any the wrapper itself.
    """
    models = outermost(model)
    if not models:
        return takes_any_keyword(model) or "cu_seqlens" in parameter_names(model)
    return all(is_applied(one) or _passes_documents(one) for one in models)


def _passes_documents(model: Any) -> bool:
    kept = LAYERS_KEEP_KEYWORDS or not model.is_gradient_checkpointing
    return kept and takes_any_keyword(model.base_model)
