"""The example's model: a small Llama over bytes."""

from __future__ import annotations

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM


def build_model(vocabulary: int, seq_len: int, seed: int) -> LlamaForCausalLM:
    """About 1.1 million parameters, the same on every rank for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
