"""BERT's self attention for versions of transformers in which BERT asks no attention registry."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from wf_transformers.attention import Attention


def unhooked_bert(model: nn.Module) -> list[Any]:
    """The self attention modules of every BERT in the model, if they ask no registry."""
    if hasattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS"):
        return []
    return [m for m in model.modules() if isinstance(m, modeling_bert.BertSelfAttention)]


def bert_attributes(module: Any, attention: Attention) -> dict[str, Any]:
    """What to set on such a module so that it calls `attention`.

    Raises:
        NotImplementedError: for a decoder, or relative position embeddings.
    """
    if module.is_decoder:
        raise NotImplementedError("config.is_decoder=True: BERT decoders are not supported")
    if module.position_embedding_type != "absolute":
        raise NotImplementedError(
            f"config.position_embedding_type={module.position_embedding_type!r} biases "
            "attention, which WallFacer lacks; only 'absolute' is supported"
        )
    forward = MethodType(bert_forward, module)
    return {"wallfacer": attention, "is_causal": False, "forward": forward}


def bert_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_value: Any = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Self attention of (b, s, width), this rank's rows; what is unsupported is refused."""
    query, key, value = (
        layer(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
        for layer in (self.query, self.key, self.value)
    )
    out, _ = self.wallfacer(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.dropout.p if self.training else 0.0,
        head_mask=head_mask,
        encoder_hidden_states=encoder_hidden_states,
        output_attentions=output_attentions,
        past_key_value=past_key_value,
    )
    return (out.flatten(2),)
