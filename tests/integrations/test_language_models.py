"""Every language model of transformers, causal or masked, is exact on two ranks or is refused.

Tables elsewhere have what a family needs; this test finds the ones that nobody thought of. A model
is skipped if sizes that fit most models make none of it. Refusals include those of the comparison
with one rank, on the first batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_on_shard,
    with_token_loss,
)
from tests.integrations.transformers_models import (  # noqa: E402
    BUILD_LOCK,
    sequence_parallel,
    stay_in_float64,
)

MAX_PARAMETERS = 20_000_000  # of a model that the sizes below made tiny
WIDTHS = {
    32: "hidden_size n_embd d_model embedding_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "kv_lora_rank",
    8: "head_dim qk_nope_head_dim v_head_dim",
    4: "qk_rope_head_dim num_attention_heads n_head num_heads decoder_attention_heads "
    "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers n_layer num_layers decoder_layers encoder_layers num_key_value_heads "
    "num_experts_per_tok moe_k moe_topk eos_token_id",
    1: "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace bos_token_id",
    0: "pad_token_id hidden_dropout_prob attention_probs_dropout_prob dropout attention_dropout "
    "activation_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout embedding_dropout "
    "residual_dropout layerdrop decoder_layerdrop classifier_dropout summary_first_dropout",
    5: "sliding_window",
    64: "max_position_embeddings n_positions",
    61: "vocab_size",
}
SIZES = {name: size for size, names in WIDTHS.items() for name in names.split()}
LATENT_HEADS = {"head_dim": 4, "num_key_value_heads": 4}  # their head_dim is the rotary part's
WITH_LATENTS = ("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu", "MiniCPM3")
OWN: dict[str, dict[str, Any]] = dict.fromkeys(WITH_LATENTS, LATENT_HEADS)
OWN["Gemma2"] = {"attn_implementation": "eager"}  # sdpa of transformers 4.51 has no soft caps
LEFT_OUT = {
    "DiffLlamaForCausalLM",  # its lambda is in float32, in the backward too
    "PhimoeForCausalLM",  # chooses experts at random in training
    "DeepseekV4ForCausalLM",  # so few tokens leave parameters of its compressors without gradients
}
EXACT = {"LlamaForCausalLM", "Qwen2MoeForCausalLM", "MambaForCausalLM", "BertForMaskedLM"}
"""Some that are neither skipped nor refused."""
MASKED = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
CAUSAL = {
    name if isinstance(name, str) else name[0]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
}


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def tiny_config(model_class: Any) -> Any:
    """The default config with those of SIZES that it has a value for."""
    config_class = model_class.config_class
    defaults = {key: getattr(config_class(), key, None) for key in SIZES}
    sizes = {k: type(x)(SIZES[k]) for k, x in defaults.items() if isinstance(x, int | float)}
    implementation = "sdpa" if model_class._supports_sdpa else "eager"
    options = {"is_decoder": model_class.__name__ in CAUSAL, "pad_token_id": 0}
    options |= {"attn_implementation": implementation}
    name = model_class.__name__.removesuffix("ForCausalLM")
    config = config_class(**sizes | options | OWN.get(name, {}))
    config._experts_implementation = "eager"  # the other implementations have no float64
    return config


def build(name: str) -> Any:
    """A float64 model in training mode, every parameter of it random."""
    model_class = getattr(tf, name)
    config = tiny_config(model_class)
    with BUILD_LOCK:
        with torch.device("meta"):
            number = sum(x.numel() for x in model_class(config).parameters())
        if number > MAX_PARAMETERS:
            raise ValueError(f"{number} parameters")
        torch.manual_seed(1)
        model = model_class(config)
        for parameter in model.parameters():
            noise = 0.1 * torch.randn_like(parameter)  # some weights are not initialised
            parameter.data = parameter.data + noise if parameter.dim() == 1 else 2 * noise
        return model.double().train()


def result_alone(name: str, batch: dict[str, Any]) -> Result:
    model = build(name)
    with NoFloat32():
        cache = {"use_cache": False} if name in CAUSAL else {}
        logits = model(input_ids=batch["input_ids"], **cache).logits
    return with_token_loss(model, logits, batch, masked_lm=name not in CAUSAL)


@pytest.mark.parametrize("name", sorted((CAUSAL | MASKED) - LEFT_OUT))
def test_a_language_model_is_exact_or_refused(name: str) -> None:
    ids = torch.randint(3, 61, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    try:
        expected = result_alone(name, batch)
    except Exception as error:
        if name in EXACT:
            raise
        pytest.skip(f"tiny sizes do not make it: {type(error).__name__}: {str(error)[:100]}")

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm), build(name)
        with NoFloat32():
            wf_transformers.attach(model, sp)
            local = sp.shard_batch(batch, labels_are_shifted=name not in CAUSAL)
            return run_on_shard(model, sp, local)

    try:
        results = run_threads(2, rank)
    except (NotImplementedError, ValueError):  # a ValueError: models that are cut inside
        if name in EXACT:
            raise
        return
    assert_shares_sum_to(expected, results)
