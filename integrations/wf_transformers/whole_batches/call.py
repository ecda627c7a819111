"""One call with a whole batch, between the hooks before the model and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook after the model needs to know of the batch that the hook before it cut."""

    seqlen: int
    """Tokens before padding."""
    local: Mapping[str, Any]
    """This rank's part: "labels" (b, s_local) where they are predicted, "cu_seqlens" with the
    padding as one more document."""
    num_items: Tensor | int | None
    """Valid labels of the optimizer step as the caller counted them, if the loss asks for them."""
    whole: bool
    """Whether logits are to be of the whole batch."""
    hidden: bool
    """Whether logits are of this rank's tokens, and nobody said that they may be."""
    fused: bool
    """Whether the model gives no logits, but values by token of the labels."""
    own_loss: bool
    """Whether the model makes the loss, from whole labels and the logits of all ranks."""
