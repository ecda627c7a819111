"""BERT's self attention for versions of transformers in which BERT asks no attention registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wf_transformers.attention import Attention


class BertSelfAttention(nn.Module):
    """Takes the place of transformers' BertSelfAttention and shares its parameters.

    Args:
        original: the module replaced. Its names of parameters stay.
        attention: what computes attention over all ranks.

    Raises:
        NotImplementedError: for a decoder, or relative position embeddings.
    """

    is_causal = False

    def __init__(self, original: Any, attention: Attention) -> None:
        super().__init__()
        if original.is_decoder:
            raise NotImplementedError("config.is_decoder=True: BERT decoders are not supported")
        if original.position_embedding_type != "absolute":
            raise NotImplementedError(
                f"config.position_embedding_type={original.position_embedding_type!r} biases "
                "attention, which WallFacer lacks; only 'absolute' is supported"
            )
        self.query, self.key, self.value = original.query, original.key, original.value
        self.dropout = original.dropout
        self.head_dim = original.attention_head_size
        self.attention = attention
        self.train(original.training)

    def forward(
        self,
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
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        out, _ = self.attention(
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
