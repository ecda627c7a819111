"""What can be told of a model by looking at it: its parts, and whom they ask."""

from __future__ import annotations

import sys

from torch import nn
from transformers.modeling_utils import PreTrainedModel

REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # what files whose attention asks the registry import


def outermost(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in `module`, itself included, that are not inside another."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return list(dict.fromkeys(m for child in module.children() for m in outermost(child)))


def asks_registry(model: PreTrainedModel) -> bool:
    """False where no layer can ask transformers' registry of attention functions.

    Only told of transformers' own models: what a file of somebody else's asks, a forward shows.
    (`_supports_attention_backend` says no of models that do ask, GPT-2 and ViT of 4.51 among them.)
    """
    if not type(model).__module__.startswith("transformers.models."):
        return True
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files.discard(PreTrainedModel.__module__)
    return any(hasattr(sys.modules.get(file), REGISTRY) for file in files)
