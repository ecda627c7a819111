"""Trainers that compute no logits: TRL's put a fused LM head on a model, which gives each token's.

With `fused_lm_head=True` such a forward returns values by token (log_probs, entropy, ...) of the
labels, or of `shift_labels`, which stand where they are predicted: `add_fused_lm_head` of TRL 1.16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

FUSED = "fused_lm_head"
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What collators without padding give to flash attention."""


def has_fused_head(model: nn.Module) -> bool:
    """Whether the model's own forward takes `fused_lm_head=True` beside `shift_labels=`."""
    parameters = inspect.signature(model.forward, follow_wrapped=False).parameters
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


def own_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the documents that flash attention was told of as "cu_seqlens"."""
    found = {key: value for key, value in given.items() if key not in VARLEN}
    borders = given.get(VARLEN[0])
    if isinstance(borders, Tensor) and found.get("cu_seqlens") is None:
        found["cu_seqlens"] = tuple(borders.to(torch.int64).tolist())
    return found
