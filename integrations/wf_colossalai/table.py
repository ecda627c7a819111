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

from wf_transformers.whole_batches.heads import head_is_over_all_rows

LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModule:
    """What we need to know of one class of attention modules."""

    causal: bool = True
    """Whether a token sees only earlier ones. Labels of causal models are shifted by us."""
    heads: tuple[str, ...] = ("",)
    """How the class names of language models end; "" is any. Classifiers and the like are known."""
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Methods of the module to replace, where it asks no registry of transformers. Each is called
    as a method of the module; `self.wallfacer` is a `wf_transformers.attention.Attention`."""
    cut: Literal["tokens", "patches"] = "tokens"
    """What is spread: the ids before the model, or what a ViT's embeddings return."""


LANGUAGE_MODEL = AttentionModule(heads=LANGUAGE_HEADS)

TABLE: Mapping[str, AttentionModule] = MappingProxyType(
    {
        "LlamaAttention": LANGUAGE_MODEL,
        "MistralAttention": LANGUAGE_MODEL,
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
        kinds = {type(module).__name__ for module in model.modules()}
        mine = sorted(kind for kind in kinds if kind.endswith("Attention"))
        raise ValueError(
            f"{name} holds no attention module that is known, but "
            f"{', '.join(mine) or 'none whose class is called ...Attention'}. Known: "
            f"{', '.join(table)}. A row of your own takes ten lines (docs/colossalai.md)"
        )
    if not name.endswith(rows[0].heads) and not head_is_over_all_rows(model):
        raise ValueError(
            f"{name} is neither a language model ({', '.join('...' + x for x in rows[0].heads)}) "
            "nor a model with another head on one"
        )
    return rows[0]
