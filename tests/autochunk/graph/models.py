"""Small models of transformers with random weights, and inputs of a call."""

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
    """A model of two layers in evaluation mode, and the keyword arguments of a call.

    Args:
        name: one of NAMES, or "mistral", whose window is a quarter of the tokens.
        attention: transformers' `attn_implementation`.
    """
    torch.manual_seed(0)
    ids = torch.randint(0, 90, (1, TOKENS))
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"attn_implementation": attention}
    text, mlp = {"vocab_size": 100}, {"intermediate_size": 256}
    match name:
        case "gpt2":
            config = GPT2Config(
                n_embd=64, n_layer=2, n_head=4, attn_implementation=attention, **text
            )
            model, kwargs = GPT2Model(config), {"input_ids": ids, "use_cache": False}
        case "llama":
            config = LlamaConfig(num_key_value_heads=2, **sizes, **mlp, **text)
            model, kwargs = LlamaForCausalLM(config), {"input_ids": ids, "logits_to_keep": 1}
        case "mistral":
            window = {"sliding_window": TOKENS // 4}
            config = MistralConfig(num_key_value_heads=2, **window, **sizes, **mlp, **text)
            model, kwargs = MistralForCausalLM(config), {"input_ids": ids, "logits_to_keep": 1}
        case "opt":
            config = OPTConfig(ffn_dim=256, word_embed_proj_dim=64, **sizes, **text)
            model, kwargs = OPTModel(config), {"input_ids": ids, "use_cache": False}
        case "bert":
            model, kwargs = BertModel(BertConfig(**sizes, **mlp, **text)), {"input_ids": ids}
            if attention == "eager":  # fused attention reads no mask here
                kwargs["attention_mask"] = torch.ones_like(ids).index_fill_(
                    1, torch.arange(TOKENS - 5, TOKENS), 0
                )
        case "vit":
            model = ViTModel(ViTConfig(image_size=224, patch_size=16, **sizes, **mlp))
            kwargs = {"pixel_values": torch.randn(1, 3, 224, 224)}
        case _:
            raise ValueError(f"no model is named {name!r}")
    return model.eval(), kwargs
