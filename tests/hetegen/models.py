"""Tiny models with random weights, their inputs, and a simulated device fast enough for them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
)

from wf_backends.hetegen import ShapedDevice
from wf_backends.hetegen.weights import Plan

VOCABULARY = 96
CONFIGS: dict[str, PretrainedConfig] = {
    "falcon": FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        bias=True, bos_token_id=1, eos_token_id=None,
    ),
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

if tf.__version__ >= "5":  # the only model whose experts are stored transposed
    CONFIGS["gpt-oss"] = tf.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip


def make_model(name: str, attention: str | None = None) -> nn.Module:
    """A model of CONFIGS in evaluation mode, with weights so large that tokens differ."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])  # save_pretrained writes the dtype into the model's config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_ids(batch: int, seqlen: int = 9) -> Tensor:
    """Random token ids (batch, seqlen), the same for the same sizes."""
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=torch.manual_seed(1))


def generate(model: nn.Module, ids: Tensor, num_tokens: int, sample: bool = False) -> Tensor:
    """Generate tokens after `ids`, greedy or sampled with a fixed seed."""
    torch.manual_seed(3)
    return model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=sample,
        pad_token_id=0,
    )


def fast_device() -> ShapedDevice:
    """A simulated device whose lanes compute a pass of a tiny model in less than 1 ms."""
    return ShapedDevice(1e8, 2e8, 1e10, call_seconds=0)


def max_memory(model: nn.Module, share: float) -> dict[int | str, int | str]:
    """The argument of `dispatch_model`: the accelerator gets this share of the model's bytes."""
    return {0: int(share * sum(parameter.nbytes for parameter in model.parameters()))}


def streamed_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that a decoding pass copies to the accelerator, by the name of the linear."""
    return {
        split.linear.name: split.streamed_decode * split.linear.row_bytes for split in plan.splits
    }


class MLP(nn.Module):
    """Linears of equal width with tanh between them; 66,560 bytes by default."""

    def __init__(self, num_layers: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


MLP_SPLIT: dict[int | str, int | str] = {0: 30_000}  # max_memory with which an MLP is split
MLP_RESIDENT: dict[int | str, int | str] = {0: "1MB"}  # max_memory into which an MLP fits


def split_and_resident(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the `memory` into which an MLP fits, too, without its warning."""
    memory = pytest.mark.parametrize("memory", [MLP_SPLIT, MLP_RESIDENT], ids=["split", "resident"])
    return pytest.mark.filterwarnings("ignore:the model takes")(memory(test))
