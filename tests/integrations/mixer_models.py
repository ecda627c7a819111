"""Tiny random models whose layers mix tokens by a convolution or a recurrence."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from tests.integrations.transformers_models import BUILD_LOCK, VOCAB

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "mamba_d_state": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
MODEL = {**SIZES, **HEADS}
PADDED = {"pad_token_id": 0}  # the models' own is outside of VOCAB

# Mamba
MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
MAMBA2 = {**MAMBA, "num_heads": 16, "head_dim": 4, "chunk_size": 8}
HYBRID = {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MULTIPLIERS = {"ssm_in_multiplier": 1.3, "attention_out_multiplier": 0.9}
MULTIPLIERS |= {"ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8]}
NO_KERNELS = {"use_mamba_kernels": False}
LAYERS = {"attn_layer_period": 2, "num_hidden_layers": 4}  # Zamba's first three are fixed
TWO_EXPERTS = {"num_experts": 2, "expert_layer_offset": 1, "expert_layer_period": 4}

# linear attention
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4}
DELTA |= {"linear_value_head_dim": 6, "head_dim": 8, "num_experts": 0} | LINEAR_FIRST
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LIGHTNING = {"block_size": 8, "head_dim": 8, "num_local_experts": 4}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}
LATENT |= {"q_lora_rank": 16, "linear_num_heads": 4, "linear_head_dim": 8} | LINEAR_FIRST
LATENT |= {"n_routed_experts": 4, "n_group": 1, "first_k_dense_replace": 1, "topk_group": 1}
LATENT |= FOUR_EXPERTS | PADDED

# short convolutions
SHORT_CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} | PADDED

ALL_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**MAMBA, "time_step_rank": 3}),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "time_step_rank": 3}),
    "mamba2": ("Mamba2", {**MAMBA2, "n_groups": 8}),
    "mamba2, 2 groups": ("Mamba2", {**MAMBA2, "n_groups": 2}),
    "mamba2, 1 group": ("Mamba2", {**MAMBA2, "n_groups": 1}),
    "zamba": (
        "Zamba",
        {**MODEL, **NO_KERNELS, **LAYERS, "attn_layer_offset": 0}
        | {"n_mamba_heads": 4, "mamba_dt_rank": 3},
    ),
    "jamba": (
        "Jamba",
        {**MODEL, **NO_KERNELS, **LAYERS, **TWO_EXPERTS, "attn_layer_offset": 1}
        | {"num_key_value_heads": 2, "mamba_dt_rank": 3},
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 48},
    ),
    "zamba2": (
        "Zamba2",
        {**MODEL, **NO_KERNELS, "layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}
        | {"n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8},
    ),
    "bamba": ("Bamba", {**MODEL, **HYBRID, "attn_layer_indices": [1], "mamba_chunk_size": 8}),
    "qwen3_next": ("Qwen3Next", {**MODEL, **DELTA}),
    "qwen3_5": ("Qwen3_5", {**MODEL, **DELTA}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {**MODEL, **HYBRID, "layer_types": ["mamba", "attention"], "mamba_chunk_size": 8}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 48},
    ),
    "nemotron_h": (
        "NemotronH",
        {**MODEL, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3}
        | {"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 4, "chunk_size": 8}
        | {"n_groups": 2, "head_dim": 8},
    ),
    "lara_mini": ("LaraMini", {**MODEL, **DELTA, **FOUR_EXPERTS, **PADDED}),
    "olmo_hybrid": ("OlmoHybrid", {**MODEL, **DELTA, **PADDED, "linear_num_value_heads": 4}),
    "minimax": ("MiniMax", {**MODEL, **FOUR_EXPERTS, **LINEAR_FIRST, **LIGHTNING}),
    "kimilinear": ("KimiLinear", {**MODEL, **LATENT}),
    "bailinghybrid": ("BailingHybrid", {**MODEL, **LATENT}),
    "falcon_h1, norm True": (
        "FalconH1",
        {**MODEL, **HYBRID, **FALCON_H1, **MULTIPLIERS, "mamba_rms_norm": True},
    ),
    "falcon_h1, norm False": (
        "FalconH1",
        {**MODEL, **HYBRID, **FALCON_H1, **MULTIPLIERS, "mamba_rms_norm": False},
    ),
    "lfm2": ("Lfm2", {**MODEL, **SHORT_CONV}),
    "lfm3": ("Lfm3", {**MODEL, **SHORT_CONV}),
}
FAMILIES = {
    family: (name, sizes)
    for family, (name, sizes) in ALL_FAMILIES.items()
    if hasattr(tf, f"{name}ForCausalLM")
}
"""Those of the installed transformers."""


def build(family: str) -> Any:
    """A float64 model in training mode, every parameter of it random."""
    name, sizes = FAMILIES[family]
    config_class = getattr(tf, f"{name}TextConfig", None) or getattr(tf, f"{name}Config")
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = config_class(**sizes)
        config._experts_implementation = "eager"  # transformers 5's grouped product has no float64
        model = getattr(tf, f"{name}ForCausalLM")(config).double().train()
        if hasattr(config, "num_attention_heads"):
            model.config._attn_implementation = "sdpa"  # Zamba's eager softmax is in float32
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model
