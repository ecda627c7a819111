"""Small models of real classes with random weights, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTModel,
    ViTConfig,
    ViTModel,
)

TOKENS = 256
NAMES = ("gpt2", "llama", "opt", "bert", "vit")


def model_and_inputs(name: str, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of two layers in evaluation mode, and the keyword arguments of a call."""
    torch.manual_seed(0)
    ids = torch.randint(0, 90, (1, TOKENS))
    size: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind: dict[str, Any] = {"attn_implementation": attention}
    if name == "gpt2":
        config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, **kind)
        return GPT2Model(config).eval(), {"input_ids": ids, "use_cache": False}
    decoder: dict[str, Any] = {"intermediate_size": 256, "vocab_size": 100, **size, **kind}
    decoder |= {"num_key_value_heads": 2}
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**decoder))
        return model.eval(), {"input_ids": ids, "logits_to_keep": 1}
    if name == "mistral":
        model = MistralForCausalLM(MistralConfig(**decoder, sliding_window=TOKENS // 4))
        return model.eval(), {"input_ids": ids, "logits_to_keep": 1}
    if name == "opt":
        config = OPTConfig(ffn_dim=256, vocab_size=100, word_embed_proj_dim=64, **size, **kind)
        return OPTModel(config).eval(), {"input_ids": ids, "use_cache": False}
    if name == "bert":
        config = BertConfig(intermediate_size=256, vocab_size=100, **size, **kind)
        mask = torch.ones_like(ids)
        mask[:, -5:] = 0
        given = {"attention_mask": mask} if attention == "eager" else {}  # fused, none at all
        return BertModel(config).eval(), {"input_ids": ids, **given}
    config = ViTConfig(intermediate_size=256, image_size=224, patch_size=16, **size, **kind)
    return ViTModel(config).eval(), {"pixel_values": torch.randn(1, 3, 224, 224)}
