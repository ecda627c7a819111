"""Models that make a loss of their own, not the cross entropy that we make of a rank's rows.

Their output embeddings then give the rows of all ranks, so that whatever the forward does with
logits and labels is what one device does. Every rank does it alike.

And models without logits: trainers of TRL put a fused LM head on a model (`add_fused_lm_head` of
TRL 1.16). With `fused_lm_head=True` such a forward returns values by token (log_probs, entropy and
others) of the labels, or of `shift_labels`, which stand where they are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature, unwrap
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from wf_transformers.documents import MASK_WORDS
from wf_transformers.models import outermost

PLAIN_LOSSES = (ForCausalLMLoss, ForMaskedLMLoss)
PLAIN_FORWARDS = ("transformers.", "peft.", "colossalai.")
"""Packages whose forwards give labels to nothing but `loss_function`, or to cross entropy."""
FUSED = "fused_lm_head"
LOSS_WORDS = ("shift_labels", "ignore_index")
"""Arguments of a call that change transformers' own loss."""
INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    *MASK_WORDS,
)
"""What is cut before a model that makes its own loss. What else is by token belongs to the loss."""


def own_loss(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """In words, what makes another loss of a call with labels than plain cross entropy."""
    word = next((word for word in LOSS_WORDS if given.get(word) is not None), None)
    return own_loss_of(model) if word is None else f"the call has {word}="


def own_loss_of(model: nn.Module) -> str | None:
    """In words, what makes the loss of `model` where that is not plain cross entropy."""
    if not has_fused_head(model):
        forward = getattr(unwrap(model.forward), "__func__", unwrap(model.forward))
        forward = forward.func if isinstance(forward, partial) else forward
        if not str(getattr(forward, "__module__", "")).startswith(PLAIN_FORWARDS):
            return f"the forward of {type(model).__name__} is its own"
    for one in outermost(model):
        function = _loss_function(one)
        if function not in PLAIN_LOSSES:
            name = getattr(function, "__name__", type(function).__name__)
            return f"the loss_function of {type(one).__name__} is {name}"
        if one is not model and own_loss_of(one) is not None:
            return own_loss_of(one)
    return None


def _loss_function(model: nn.Module) -> Any:
    """What the model calls for its loss, under the tiles of `wf_backends.tiling`."""
    function: Any = getattr(model, "loss_function", ForCausalLMLoss)
    if getattr(function, "__module__", "").startswith("wf_backends.tiling"):
        return function.__self__.loss_function
    return function


def output_embeddings(model: nn.Module) -> list[nn.Module]:
    """The modules that give the logits of the Hugging Face models in `model`."""
    heads = [one.get_output_embeddings() for one in outermost(model)]
    return [head for head in heads if isinstance(head, nn.Module)]


def no_head(model: nn.Module) -> str:
    """What is wrong with a model whose loss comes from no module that gives logits."""
    return (
        f"{type(model).__name__} makes a loss of its own, and its output embeddings "
        "(get_output_embeddings()) were not called: it would be of this rank's tokens only. Make "
        "the loss from the logits that they return, or from logits of a call without labels"
    )


def refuse_own_loss(model: nn.Module) -> None:
    """For calls whose labels are a rank's part.

    Raises:
        NotImplementedError: if the loss is not plain cross entropy.
    """
    for one in outermost(model):
        found = own_loss_of(one)
        if found is not None:
            raise NotImplementedError(
                f"{found}: of this rank's labels it may be another loss. Leave num_valid= out and "
                "make it from the logits: of all tokens, sp.unshard(logits), or sum what each "
                "valid token adds and divide by the number of all ranks' (see sp.loss)"
            )


def has_fused_head(model: nn.Module) -> bool:
    """Whether the model's own forward takes `fused_lm_head=True` beside `shift_labels=`."""
    parameters = signature(model.forward, follow_wrapped=False).parameters
    return {FUSED, "shift_labels"} <= set(parameters)


def fused_fields(
    output: Mapping[str, Any], num_items: Tensor | int | None, whole: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The fields of the whole batch: by token (b, S - 1), as one device gives them, and the loss.

    Args:
        output: of this rank's tokens, (b, s_local) each.
        num_items: what the loss is divided by; None: the tokens with a label.
        whole: (b, S) of a field, on every rank of the group.
    """
    found = {
        key: whole(value)[:, :-1]  # the last token predicts nothing
        for key, value in output.items()
        if isinstance(value, Tensor) and value.dim() == 2
    }
    if num_items is None:
        num_items = found["label_mask"].sum().clamp(min=1)
    return found | {"loss": -found["log_probs"].sum() / num_items}
