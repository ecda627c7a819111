"""The known attention modules, and how models that contain them are split over ranks.

One row per attention module, not one file per model. A row of your own goes into a policy
(`WallFacerPolicy.table`) or into `apply(..., table=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from wf_transformers.whole_batches.heads import head_is_over_all_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModule:
    """Describes one class of attention modules."""

    causal: bool = True
    """Whether a token sees only earlier tokens. WallFacer shifts the labels of causal models."""
    heads: tuple[str, ...] = ("",)
    """Suffixes of class names of language models; "" allows any. Classifiers are always allowed."""
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Methods that replace the module's, for modules that do not use transformers' registry of
    attention. In them `self.wallfacer` is a `wf_transformers.attention.function.Attention`."""
    cut: Literal["tokens", "patches"] = "tokens"
    """What is split: the input ids of the model, or the output of a ViT's embeddings."""


TABLE: Mapping[str, AttentionModule] = MappingProxyType(
    {
        **dict.fromkeys(
            "LlamaAttention MistralAttention Qwen2Attention Qwen3Attention CohereAttention "
            "GPT2Attention GPTJAttention OPTAttention".split(),
            AttentionModule(heads=("ForCausalLM", "LMHeadModel")),
        ),
        "BertSelfAttention": AttentionModule(causal=False, heads=("ForMaskedLM",)),
        "ViTSelfAttention": AttentionModule(causal=False, cut="patches"),
    }
)
"""The known modules. To add yours: {**TABLE, "OwnAttention": AttentionModule()}."""


def find(model: nn.Module, table: Mapping[str, AttentionModule]) -> AttentionModule:
    """Return the row of the attention modules in `model`.

    Subclasses have the row of their base class (transformers' BertSdpaSelfAttention).
    """
    name = type(model).__name__
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    rows = [row for class_name, row in table.items() if class_name in bases]
    if not rows:
        classes = {type(module).__name__ for module in model.modules()}
        unknown = sorted(c for c in classes if c.endswith("Attention"))
        raise ValueError(
            f"{name} holds no attention module that is known, but "
            f"{', '.join(unknown) or 'none whose class is called ...Attention'}. Known: "
            f"{', '.join(table)}. A row of your own takes ten lines (docs/colossalai.md)"
        )
    if not name.endswith(rows[0].heads) and not head_is_over_all_rows(model):
        raise ValueError(
            f"{name} is neither a language model ({', '.join('...' + x for x in rows[0].heads)}) "
            "nor a model with another head on one; PEFT makes a PeftModelForCausalLM of one with "
            'LoraConfig(task_type="CAUSAL_LM")'
        )
    return rows[0]
