"""Models with a custom loss, other than the cross entropy that we compute from a rank's rows.

The logits of all ranks are gathered after their output embeddings, so that every rank computes with
logits and labels what one device computes.

Also models without logits: trainers of TRL put a fused LM head on a model (`add_fused_lm_head` of
TRL 1.16). With `fused_lm_head=True` its forward returns values for every token (log_probs, entropy
and others) of the labels, or of `shift_labels`, which are already shifted.

And models whose forward Liger's kernels replaced: from labels they make a loss and no logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from inspect import getsource, signature, unwrap
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from wf_transformers.attention.documents import MASK_ARGUMENTS
from wf_transformers.calls import TOKENS
from wf_transformers.families.experts import wants_router_loss
from wf_transformers.models import outermost, transformers_classes

LossKind = Literal["plain", "fused_loss", "fused_head", "custom"]
"""Where the loss of a call comes from. Labels are this rank's, (b, s), except in the last row:

kind          the model gets          it returns                  the loss is made of
"plain"       no labels               logits (b, s, V)            logits and labels
"fused_loss"  labels (Liger)          the sum of their losses     this sum
"fused_head"  labels (TRL's head)     values (b, s), no logits    their log-probabilities
"custom"      labels of all ranks,    its own loss                that, as it is
              logits of all ranks
"""

LOG = logging.getLogger(__name__)
PLAIN_LOSSES = (ForCausalLMLoss, ForMaskedLMLoss)
LIGER = "liger_kernel."
SKIP_LOGITS = "skip_logits"
"""Argument of Liger's forwards."""
PLAIN_FORWARDS = ("transformers.", "peft.", "colossalai.")
"""Packages whose forwards use labels only in `loss_function` or cross entropy."""
FUSED_HEAD = "fused_lm_head"
"""Argument of the forwards of TRL's fused head."""
NUM_ITEMS = "num_items_in_batch"
LOSS_ARGUMENTS = ("shift_labels", "ignore_index")
"""Arguments of a call that change transformers' own loss."""
INPUTS = (*TOKENS, "attention_mask", "position_ids", "token_type_ids", *MASK_ARGUMENTS)
"""Arguments that are cut for a model with a custom loss. Others by token belong to the loss."""

NO_HEAD = (
    "{} computes a loss of its own, and its output embeddings (get_output_embeddings()) were not "
    "called: it would be of this rank's tokens only. Compute the loss from the logits that they "
    "return, or from logits of a call without labels"
)


def custom_loss_reason(model: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    """As text, why the loss of a call is not plain cross entropy; None if it is."""
    name = next((name for name in LOSS_ARGUMENTS if arguments.get(name) is not None), None)
    return custom_loss_reason_of(model) if name is None else f"the call has {name}="


def custom_loss_reason_of(model: nn.Module) -> str | None:
    """As text, why the loss of `model` is not plain cross entropy; None if it is."""
    fused = has_fused_head(model) or has_fused_loss(model)
    if not fused and not _is_from(PLAIN_FORWARDS, model):
        return f"the forward of {type(model).__name__} is its own"
    for inner in outermost(model):
        function = _loss_function(inner)
        if function not in PLAIN_LOSSES:
            name = getattr(function, "__name__", type(function).__name__)
            return f"the loss_function of {type(inner).__name__} is {name}"
        if inner is not model and (reason := custom_loss_reason_of(inner)) is not None:
            return reason
    return None


def forward_of(model: nn.Module) -> Any:
    """The function that the model's forward is, without wrappers."""
    forward = getattr(unwrap(model.forward), "__func__", unwrap(model.forward))
    return forward.func if isinstance(forward, partial) else forward


def _is_from(packages: str | tuple[str, ...], model: nn.Module) -> bool:
    """Whether the model's forward is a function of one of the packages."""
    return str(getattr(forward_of(model), "__module__", "")).startswith(packages)


def has_fused_loss(model: nn.Module) -> bool:
    """Whether Liger's kernels make the loss of labels, and no logits, also of labels that are
    shifted already (early versions shift them once more)."""
    return _is_from(LIGER, model) and "shift_labels" in getsource(forward_of(model))


def fuses_loss(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether labels give a loss without logits, to which no router adds its own."""
    inner = outermost(model)
    return all(has_fused_loss(x) and not wants_router_loss(x, arguments) for x in inner)


def labels_for(loss: LossKind, labels: Tensor | None) -> dict[str, Any]:
    """What a model gets for its loss, or values, of this rank's shifted labels (b, s)."""
    if loss == "fused_loss":  # divided by 1, it is the sum
        return {"labels": labels, "shift_labels": labels, NUM_ITEMS: 1, SKIP_LOGITS: True}
    return {"shift_labels": labels} if loss == "fused_head" else {}


def warned_about_padding(batch: Mapping[str, Any]) -> bool:
    """Whether a custom loss gets logits of padding, of which this warns."""
    mask = batch.get("attention_mask")
    if is_padded := isinstance(mask, Tensor) and not bool(mask.all()):
        LOG.warning(
            "this model computes a loss of its own, and logits at padding differ from those of "
            "one device: ignore them in the loss, as cross entropy does by labels of -100"
        )
    return is_padded


def _loss_function(model: nn.Module) -> Any:
    """The function that the model calls for its loss; AutoChunk's tiling may have wrapped it."""
    function: Any = getattr(model, "loss_function", ForCausalLMLoss)
    if getattr(function, "__module__", "").startswith("wf_backends.autochunk.tiling"):
        return function.__self__.loss_function
    return function


def divides_by_items(model: nn.Module) -> bool:
    """Whether the argument `num_items_in_batch` divides the loss of a model of transformers.

    It does where the model's forward passes it, or all keyword arguments, to `loss_function`.
    Masked models of transformers 5 take the argument and ignore it, as Mamba does in 4.
    """
    forwards = (vars(cls).get("forward") for cls in transformers_classes(type(model)))
    return any(_passes_items(forward) for forward in forwards if forward is not None)


@lru_cache(maxsize=1024)  # asked in every call of `forward_kwargs` with num_valid
def _passes_items(forward: Any) -> bool:
    """Not by Python's parser: in Python 3.11 it fails if ranks are threads that parse at a time."""
    calls = getsource(unwrap(forward)).split("loss_function(")[1:]
    return any("**" in (text := _up_to_bracket(call)) or NUM_ITEMS in text for call in calls)


def _up_to_bracket(text: str) -> str:
    """The text before the bracket that closes one before it."""
    depths = accumulate((c == "(") - (c == ")") for c in text)
    return text[: next((i for i, depth in enumerate(depths) if depth < 0), len(text))]


def output_embeddings(model: nn.Module) -> list[nn.Module]:
    """The modules that give the logits of the Hugging Face models in `model`."""
    heads = [inner.get_output_embeddings() for inner in outermost(model)]
    return [head for head in heads if isinstance(head, nn.Module)]


def refuse_custom_loss(model: nn.Module) -> None:
    """Refuse a custom loss in calls with a rank's part of the labels."""
    for inner in outermost(model):
        reason = custom_loss_reason_of(inner)
        if reason is None and not divides_by_items(inner):
            reason = f"the loss of {type(inner).__name__} is not divided by {NUM_ITEMS}"
        if reason is not None:
            raise NotImplementedError(
                f"{reason}: for this rank's labels alone it may differ. Leave num_valid= out and "
                "compute it from the logits of all tokens, sp.unshard(logits), or sum over this "
                "rank's valid tokens and divide by the number of all ranks' (see sp.loss)"
            )


def refuse_uncounted(reason: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a call whose loss is to be averaged over tokens, if nobody has counted them."""
    if arguments.get(NUM_ITEMS) is None:
        raise NotImplementedError(
            f'{reason}, and "loss_average": "token" knows plain cross entropy only: take "sequence"'
        )


def has_fused_head(model: nn.Module) -> bool:
    """Whether the model's own forward takes `fused_lm_head=True` beside `shift_labels=`."""
    parameters = signature(model.forward, follow_wrapped=False).parameters
    return {FUSED_HEAD, "shift_labels"} <= set(parameters)


def fused_head_fields(
    output: Mapping[str, Any],
    num_items: Tensor | int | None,
    gather: Callable[[Tensor], Tensor],
    aux_loss: Tensor | float,
) -> dict[str, Tensor]:
    """The output fields of the whole batch, (b, S - 1) as on one device, and the loss.

    Args:
        output: fields of this rank's tokens, (b, s).
        num_items: the divisor of the loss; None: the number of tokens with a label.
        gather: (b, s) -> (b, S), on every rank of the group.
        aux_loss: what routers of experts add to the loss.
    """
    fields = {
        key: gather(value)[:, :-1]  # the last token has no target
        for key, value in output.items()
        if isinstance(value, Tensor) and value.dim() == 2
    }
    if num_items is None:
        num_items = fields["label_mask"].sum().clamp(min=1)
    fields["loss"] = -fields["log_probs"].sum() / num_items + aux_loss
    if "aux_loss" in output:
        fields["aux_loss"] = output["aux_loss"]
    return fields
