"""Tiny random models of the families that the table of wf_transformers knows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.integrations.results import Result, with_token_loss
from tests.integrations.transformers_models import (
    BERT_DROPOUT,
    BUILD_LOCK,
    GPT2,
    LLAMA,
    NO_DROPOUT,
    SEQLEN,
    SMALL,
    VOCAB,
)
from wf_transformers.calls import parameter_names

PADDED = {"pad_token_id": 0}  # transformers 5.0 builds some models only with one
ENCODER = {**SMALL, **BERT_DROPOUT, "num_attention_heads": 4, "max_position_embeddings": 64}
GPT = {**GPT2, **NO_DROPOUT, "rotary_dim": 4}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO_WINDOWS = {"attention_types": [[["global", "local"], 1]], "window_size": 5, "vocab_size": VOCAB}
UNDROPPED = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_dropout": 0.0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}
MODERN = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}


GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}
GEMMA4 = {
    **LLAMA,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA3N = {
    **{k: x for k, x in GEMMA4.items() if k != "global_head_dim"},
    "intermediate_size": [48] * 4,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "laurel_rank": 4,
    "vocab_size": VOCAB + 1,
    "vocab_size_per_layer_input": VOCAB + 1,
    "pad_token_id": VOCAB,  # whose embedding of zeros has gradients of NaN
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
INDEXED = {
    **LLAMA,
    **MLA,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "index_n_heads": 16,  # with few of them keys have equal scores of 0
    "index_head_dim": 16,
    "index_topk": 6,
    "pad_token_id": 0,
}
SHARED_CHOICE = {"indexer_types": ["full", "shared", "full"]}
DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 5,
    "shared_experts_intermediate_size": 16,
    **{"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_head_dim": 12},
    **{"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
    **{"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
}
MISTRAL_LARGE4 = {
    "text_config": {**INDEXED, **SHARED_CHOICE, "model_type": "mistral_large4_text"},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
    "image_token_index": 1,
}
GLM5_NEXT = {
    "text_config": {
        **INDEXED,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "index_topk": 8,
        "index_kpool": 4,  # pools of tokens of two ranks, and a tail
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "n_group": 1,
        "initializer_range": 0.2,
        "model_type": "glm5_next_text",
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 32,
        "projection_intermediate_size": 32,
        "model_type": "glm5_next_vision",
    },
}
MINIMAX_M3 = {
    **LLAMA,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 3,
    "index_topk_blocks": 3,
}
DEEPSEEK_V4 = {
    **LLAMA,
    "num_hidden_layers": 3,
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
    ],
    "compress_rates": {"heavily_compressed_attention": 5, "compressed_sparse_attention": 2},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "sliding_window": 4,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "hc_mult": 2,
    "pad_token_id": 0,
}
FALCON = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "multi_query": True}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, **FALCON}


@dataclass(frozen=True)
class Family:
    """A class of transformers, and the sizes of a tiny model."""

    model: str
    config: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    masked_lm: bool = False
    """Whether a label belongs to its own token and not to the one before."""
    reference: str = "sdpa"
    """The attention of transformers that computes all options of the config."""
    trains: bool = True
    """False: the forward draws random numbers in training, so the model is in evaluation mode."""


FAMILIES = {
    "opt": Family("OPTForCausalLM", "OPTConfig", {**LLAMA, **OPT}),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", GPT),
    "codegen": Family("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "n_head": 8, "n_embd": 64}),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**NEO, **NEO_WINDOWS, **UNDROPPED, "embed_dropout": 0.0},
    ),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", {**LLAMA, **PADDED}),
    "nemotron": Family("NemotronForCausalLM", "NemotronConfig", LLAMA),
    "phimoe": Family("PhimoeForCausalLM", "PhimoeConfig", {**LLAMA, **EXPERTS}, trains=False),
    "phimoe_window": Family(
        "PhimoeForCausalLM", "PhimoeConfig", {**LLAMA, **EXPERTS, "sliding_window": 5}, trains=False
    ),
    "olmoe": Family("OlmoeForCausalLM", "OlmoeConfig", {**LLAMA, **EXPERTS}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**LLAMA, **EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**LLAMA, **EXPERTS}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**LLAMA, **EXPERTS, "moe_intermediate_size": 16, "head_dim": 16},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**LLAMA, **GEMMA, "attn_logit_softcapping": 2.0},
        reference="eager",
    ),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA, **GEMMA}),
    "gemma3n": Family("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "gemma4": Family("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "gemma4_shared_keys": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "exaone4": Family(  # three layers of four have a window, and all have the attribute
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {
            **LLAMA,
            **PADDED,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "sliding_window_pattern": 4,
        },
    ),
    "falcon": Family("FalconForCausalLM", "FalconConfig", {**LLAMA, **FALCON}),
    "falcon_grouped": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA, **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_alibi": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA, **FALCON, "alibi": True, "multi_query": False},
    ),
    "falcon_alibi_grouped": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA, **FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "bloom": Family("BloomForCausalLM", "BloomConfig", BLOOM),
    "mpt": Family(
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LLAMA, **EXPERTS, "head_dim": 8, "sliding_window": 5},
        reference="eager",
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LLAMA, **MLA}),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", "DeepseekV32Config", INDEXED),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**INDEXED, **SHARED_CHOICE}),
    "axk2": Family("AXK2ForCausalLM", "AXK2Config", INDEXED),
    "hy_v4": Family("HYV4ForCausalLM", "HYV4Config", {**INDEXED, **SHARED_CHOICE}),
    "dots3": Family("Dots3NoteForCausalLM", "Dots3NoteTextConfig", {**INDEXED, **DOTS3}),
    "mistral_large4": Family(
        "MistralLarge4ForConditionalGeneration", "MistralLarge4Config", MISTRAL_LARGE4
    ),
    "glm5_next": Family("Glm5NextForConditionalGeneration", "Glm5NextConfig", GLM5_NEXT),
    "minimax_m3": Family("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", MINIMAX_M3),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM", "DeepseekV4Config", DEEPSEEK_V4, reference="eager"
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER, masked_lm=True),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER, masked_lm=True),
    "xlm_roberta": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER, masked_lm=True),
    "camembert": Family("CamembertForMaskedLM", "CamembertConfig", ENCODER, masked_lm=True),
    "modernbert": Family(
        "ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, **MODERN}, masked_lm=True
    ),
}

NOT_GENERATING = (
    *("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3", "mistral_large4", "minimax_m3"),
    *("glm5_next", "deepseek_v4"),
)
"""Families whose generation is refused: their layers choose keys by an indexer, or merge them."""


class NoFloat32(TorchFunctionMode):
    """Inside it torch rounds nothing to float32, to which some models cast their scores.

    It acts on the thread that enters it, and not in a backward.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if func is torch.full and len(args) == 2 and isinstance(args[1], float):
            kwargs = {"dtype": torch.float64} | (kwargs or {})
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **wide)


def build(family: Family, implementation: str = "sdpa", **config_changes: Any) -> nn.Module:
    """A float64 model; random, the same every time."""
    if not hasattr(tf, family.model):
        pytest.skip(f"transformers {tf.__version__} has no {family.model}")
    sizes = {**family.sizes, "initializer_range": 0.2, **config_changes}
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = getattr(tf, family.config)(**sizes)
        model_class = getattr(tf, family.model)
        config._experts_implementation = "eager"  # the others of transformers 5 have no float64
        config._attn_implementation = implementation if model_class._supports_sdpa else "eager"
        model = model_class(config)
    return model.double().train(family.trains)


def batch() -> dict[str, Any]:
    """Two samples of random tokens, which are their own labels."""
    drawing = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB, (2, SEQLEN), generator=drawing)  # 0 to 4 are special
    return {"input_ids": ids, "labels": ids.clone()}


def run_on_one_device(family: Family, model: nn.Module, inputs: dict[str, Any]) -> Result:
    """The reference: the model with transformers' own attention, without a KV cache."""
    given = dict.fromkeys({"use_cache"} & {*parameter_names(model)}, False)
    with NoFloat32():
        logits = model(**given, **{k: v for k, v in inputs.items() if k != "labels"}).logits
    return with_token_loss(model, logits, inputs, family.masked_lm)


def copy_and_spoil(model: nn.Module) -> nn.Module:
    """A deep copy of the model, whose own parameters become NaN: the copy must not use them."""
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return copied
