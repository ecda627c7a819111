"""One call with a whole batch: passed from the hook before the model to the hook after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchCall:
    """What the hook after the model must know about a call."""

    seqlen: int
    """Tokens without padding."""
    local: Mapping[str, Any]
    """This rank's part of the batch: "labels" (b, s_local), already shifted unless the head is a
    masked one; "cu_seqlens" with the padding as one more document."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step, if the caller counted them for the loss."""
    whole_logits: bool
    """Whether the output gets the logits of the whole batch."""
    hides_logits: bool
    """Whether the output's logits are replaced by `LocalLogits`: they are of this rank's tokens,
    and the caller did not ask for that."""
    fused_head: bool
    """Whether the model returns no logits, but values for every token of the labels."""
    fused_loss: bool
    """Whether the model returns no logits, but the sum of the losses of this rank's tokens."""
    custom_loss: bool
    """Whether the model computes the loss itself, from the labels and logits of all ranks."""
