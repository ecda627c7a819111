"""From the result of sp.shard_batch to the keyword arguments of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends.parallel import at_least_one, mask_arguments
from wf_transformers.attach import is_applied
from wf_transformers.attention.blocks import BLOCKS
from wf_transformers.attention.masks import refuse_empty
from wf_transformers.attention.registry import registered_for
from wf_transformers.calls import parameter_names, required_tokens, takes_any_keyword
from wf_transformers.families.experts import ROUTER_MASK, has_router_loss
from wf_transformers.families.media_table import language_model, media_modules
from wf_transformers.families.mixing import refuse_missing_apply, refuse_unspreadable
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.families.table import BUILDS_MASKS
from wf_transformers.models import has_module, outermost, transformers_class
from wf_transformers.whole_batches.custom_loss import refuse_custom_loss

# From 4.53 on, checkpointed layers get all keyword arguments again when they are recomputed.
LAYERS_KEEP_KEYWORDS = find_spec("transformers.modeling_layers") is not None

NOT_PASSED_ON = ("attention_mask", "labels", "valid_labels")
"""The last is a number for the loss, from the loaders of "loss_average": "token"."""


def forward_kwargs(
    model: nn.Module, local_batch: Mapping[str, Any], *, num_valid: Tensor | int | None = None
) -> dict[str, Any]:
    """The keyword arguments for `model(**...)` on this rank's part of a batch.

    Position ids and documents are passed on. The attention mask is not: documents replace it.

    Args:
        model: the model to be called, or a wrapper with the model as its `.module`.
        local_batch: what sp.shard_batch returned.
        num_valid: valid labels of the whole sequence-parallel group. With it, labels are passed on,
            and the loss of a ...ForCausalLM is this rank's share, as that of sp.loss: the sum over
            the ranks is the mean of one device. Without it, labels are left out, for sp.loss.

    Raises:
        ValueError: if documents or slices would not reach attention, or a sample is all padding.
        NotImplementedError: for a model that cannot run on several ranks (`refuse_unspreadable`),
            and with `num_valid` for a model whose loss is not plain cross entropy.
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    if is_cut_inside(model):
        raise ValueError(
            f"{type(model).__name__} is cut inside: call it with the whole batch on every rank"
        )
    causal = is_causal(model) or BLOCKS in local_batch
    kwargs = {k: v for k, v in local_batch.items() if k not in NOT_PASSED_ON}
    if causal:
        mask = None if has_module(model, BUILDS_MASKS) else _placeholder_mask(model, local_batch)
        kwargs |= {"attention_mask": mask, "use_cache": False}
    elif "attention_mask" in local_batch and not mask_arguments(local_batch):
        kwargs["cu_seqlens"] = _borders_of_samples(model, local_batch["attention_mask"])
    _refuse_unapplied(model)
    if any(has_router_loss(inner) and is_applied(inner) for inner in outermost(model)):
        kwargs |= {ROUTER_MASK: local_batch.get("attention_mask")}
    if (mask_kwargs := mask_arguments(kwargs)) and not _documents_reach_attention(model):
        name, argument = type(model).__name__, next(iter(mask_kwargs))
        raise ValueError(
            f"{name} of transformers {transformers.__version__} does not pass {argument} to "
            "attention; call wf_transformers.apply(model, sp) once"
            if outermost(model)
            else f"the forward of {name} takes no {argument}: give it the argument, and pass it "
            "on to sp.attention"
        )
    if num_valid is not None:
        refuse_custom_loss(model)
        kwargs |= {"labels": local_batch["labels"], "shift_labels": local_batch["labels"]}
        kwargs["num_items_in_batch"] = at_least_one(num_valid)
    return kwargs


def _borders_of_samples(model: nn.Module, mask: Tensor) -> tuple[tuple[int, ...], ...]:
    """For each sample 0, its length, and S if it has padding, which full attention would see; from
    this rank's rows of a mask (b, s), 1 = valid."""
    attention = next(filter(None, map(registered_for, outermost(model))), None)
    if attention is None:
        raise ValueError(
            f"attention_mask gives samples of different lengths, and {type(model).__name__} is not "
            "attached: call wf_transformers.attach(model, sp), or give samples of one length"
        )
    lengths = attention.sp.sum_over_ranks(mask.sum(dim=1)).tolist()
    refuse_empty(lengths)
    seqlen = mask.shape[1] * attention.sp.size
    return tuple((0, n, seqlen) if n < seqlen else (0, n) for n in lengths)


def is_causal(model: nn.Module) -> bool:
    """Whether no module in `model` that sees tokens says that its attention is not causal."""
    encoders = media_modules(model)
    others = ((n, m) for n, m in model.named_modules() if not getattr(m, "is_causal", True))
    return all(not encoders.isdisjoint(name.split(".")) for name, _ in others)


def _refuse_unapplied(model: nn.Module) -> None:
    """Make the checks of `apply` for models that were only built with our name."""
    for pretrained in outermost(model):
        attention = registered_for(pretrained)
        if attention is None or is_applied(language_model(pretrained)):
            continue
        if attention.sp.size > 1:
            refuse_unspreadable(pretrained)
            refuse_missing_apply(pretrained)


def _placeholder_mask(model: nn.Module, local_batch: Mapping[str, Any]) -> Tensor:
    """(b, 1, 1, 1) zeros: hides nothing, and keeps the model from building an (s, s) mask. Some
    models write the smallest number of their dtype there."""
    tokens = required_tokens(local_batch)
    is_float64 = next(model.parameters(), tokens).dtype == torch.float64
    dtype = torch.float64 if is_float64 else torch.float32
    return torch.zeros(len(tokens), 1, 1, 1, device=tokens.device, dtype=dtype)


def _documents_reach_attention(model: nn.Module) -> bool:
    """Whether cu_seqlens reach attention, in the forward and when a layer is recomputed.

    All Hugging Face models in a wrapper must pass them on; without any, the wrapper itself.
    """
    for inner in map(language_model, outermost(model)):
        if is_applied(inner):
            continue
        recomputed_with_kwargs = LAYERS_KEEP_KEYWORDS or not inner.is_gradient_checkpointing
        if not (recomputed_with_kwargs and _hands_keywords_on(inner)):
            return False
    return documents_can_reach(model)


def _hands_keywords_on(model: PreTrainedModel) -> bool:
    """Whether the base model takes any keyword, and the code of its head calls it with `**kwargs`:
    GPT-2's head in transformers 4 has them for the loss only."""
    if model.base_model is model or not takes_any_keyword(model.base_model):
        return takes_any_keyword(model.base_model)
    code = inspect.getsource(inspect.unwrap(transformers_class(model).forward))
    return re.search(rf"self\.{model.base_model_prefix}[\w.]*\([^()]*\*\*", code) is not None


def documents_can_reach(model: nn.Module) -> bool:
    """Whether a model without Hugging Face models takes cu_seqlens; these do once applied."""
    takes_any = bool(outermost(model)) or takes_any_keyword(model)
    return takes_any or "cu_seqlens" in parameter_names(model)
