"""Tiny models with random weights, and devices fast enough for them."""

from __future__ import annotations

from copy import deepcopy

import torch
import transformers as tf
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
)

from wf_backends.hetegen import ShapedDevice

VOCABULARY = 96
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4,
        bos_token_id=1, eos_token_id=None,
    ),
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=88, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
    ),
    "llama-tied": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attention_bias=True, tie_word_embeddings=True, eos_token_id=None,
    ),
    "opt": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
        eos_token_id=None, pad_token_id=0,
    ),
    "mixtral": MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, eos_token_id=None,
    ),
}  # fmt: skip

if tf.__version__ >= "5":  # its experts are transposed, as no others'
    CONFIGS["gpt-oss"] = tf.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip


def make_model(name: str, attention: str | None = None) -> nn.Module:
    """A model with weights large enough that tokens differ, in evaluation mode."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])  # saving a model writes its type there
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def fast_device() -> ShapedDevice:
    return ShapedDevice(1e8, 2e8, 1e10, call_seconds=0)


def split_memory(model: nn.Module, share: float) -> dict[int | str, int | str]:
    """So much of the model's bytes."""
    return {0: int(share * sum(p.nbytes for p in model.parameters()))}


class Plain(nn.Module):
    """Some linears in a row."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x
