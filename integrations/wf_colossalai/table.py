"""Which attention modules we know, and how a model that holds them is spread over ranks.

One row per attention module, not one file per model. A row of your own goes into a policy
(`WallFacerPolicy.table`) or into `apply(..., table=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModule:
    """What we need to know of one class of attention modules."""

    causal: bool = True
    """Whether a token sees only earlier ones. Labels of causal models are shifted by us."""
    heads: tuple[str, ...] = ("",)
    """How the class names of models end whose output has one row per token; "" is any."""
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Methods of the module to replace, where it asks no registry of transformers. Each is called
    as a method of the module; `self.wallfacer` is a `wf_transformers.attention.Attention`."""
    cut: Literal["tokens", "patches"] = "tokens"
    """What is spread: the ids before the model, or what a ViT's embeddings return."""
    pipeline: bool = False
    """Whether ColossalAI's pipeline forwards of these models build no mask of (S, S) elements."""


LANGUAGE_MODEL = AttentionModule(heads=LANGUAGE_HEADS)
PIPELINED = AttentionModule(heads=LANGUAGE_HEADS, pipeline=True)

TABLE: Mapping[str, AttentionModule] = MappingProxyType(
    {
        "LlamaAttention": PIPELINED,
        "MistralAttention": PIPELINED,
        "Qwen2Attention": LANGUAGE_MODEL,
        "GPT2Attention": LANGUAGE_MODEL,
        "GPTJAttention": LANGUAGE_MODEL,
        "OPTAttention": LANGUAGE_MODEL,
        "BertSelfAttention": AttentionModule(causal=False, heads=("ForMaskedLM",)),
        "ViTSelfAttention": AttentionModule(causal=False, cut="patches"),
    }
)
"""What is known; yours beside it: {**TABLE, "OwnAttention": AttentionModule()}."""


def find(model: nn.Module, table: Mapping[str, AttentionModule]) -> AttentionModule:
    """The row of the attention modules that `model` holds.

    Subclasses count as the class they come from (transformers' BertSdpaSelfAttention).

    Raises:
        ValueError: if it holds none that we know, or its head makes no row per token.
    """
    name = type(model).__name__
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    rows = [row for known, row in table.items() if known in bases]
    if not rows:
        mine = sorted({type(m).__name__ for m in model.modules() if _is_attention(m)})
        raise ValueError(
            f"{name} holds no attention module that is known, but "
            f"{', '.join(mine) or 'none whose class is called ...Attention'}. Known: "
            f"{', '.join(table)}. A row of your own takes ten lines (docs/colossalai.md)"
        )
    if not name.endswith(rows[0].heads):
        raise ValueError(
            f"{name} is no model with one output row per token, which its attention modules are "
            f"known for: {', '.join('...' + head for head in rows[0].heads)}"
        )
    return rows[0]


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")
