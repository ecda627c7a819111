"""Which attention modules we know, and how a model that holds them is spread over ranks.

One row per attention module, not one file per model. A row of your own goes into a policy
(`WallFacerPolicy.table`) or into `apply(..., table=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

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


def gptj_attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """GPTJAttention._attn: (b, h, s, d) each; returns the same shape, and no weights."""
    dropout = self.attn_dropout.p if self.training else 0.0
    scale = 1.0 / float(self.scale_attn)
    out, _ = self.wallfacer(
        self, query, key, value, attention_mask, dropout, scale, is_causal=True, head_mask=head_mask
    )
    return out.transpose(1, 2), None


def opt_forward(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_value: Any = None,
    attention_mask: Tensor | None = None,
    layer_head_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """OPTAttention.forward: (b, s, width) of this rank's rows."""
    query, key, value = (
        layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for layer in (self.q_proj, self.k_proj, self.v_proj)
    )
    out, _ = self.wallfacer(
        self,
        query,
        key,
        value,
        attention_mask,
        self.dropout if self.training else 0.0,
        self.scaling,
        is_causal=True,
        head_mask=layer_head_mask,
        encoder_hidden_states=key_value_states,
        past_key_value=past_key_value,
    )
    return self.out_proj(out.flatten(2)), None, None


LANGUAGE_MODEL = AttentionModule(heads=LANGUAGE_HEADS)
PIPELINED = AttentionModule(heads=LANGUAGE_HEADS, pipeline=True)

TABLE: Mapping[str, AttentionModule] = MappingProxyType(
    {
        "LlamaAttention": PIPELINED,
        "MistralAttention": PIPELINED,
        "Qwen2Attention": LANGUAGE_MODEL,
        "GPT2Attention": LANGUAGE_MODEL,
        "GPTJAttention": AttentionModule(heads=LANGUAGE_HEADS, methods={"_attn": gptj_attn}),
        "OPTAttention": AttentionModule(heads=LANGUAGE_HEADS, methods={"forward": opt_forward}),
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
