"""Tiny random models of the table's families, on one device and on ranks as threads."""

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

import wf_transformers
from tests.helpers import run_threads
from tests.integrations.transformers_models import (
    BERT_DROPOUT,
    BUILDING,
    GPT2,
    LLAMA,
    NO_DROPOUT,
    SEQLEN,
    SMALL,
    VOCAB,
    assert_close,
    gradients,
    sequence_parallel,
)
from wf_backends.parallel.data import prepare_batch
from wf_backends.parallel.loss import count_valid, token_loss

ENCODER = {**SMALL, **BERT_DROPOUT, "num_attention_heads": 4, "max_position_embeddings": 64}
GPT = {**GPT2, **NO_DROPOUT, "rotary_dim": 4}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO_KINDS = {"attention_types": [[["global", "local"], 1]], "window_size": 5, "vocab_size": VOCAB}
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
FALCON = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "multi_query": True}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, **FALCON}


@dataclass(frozen=True)
class Family:
    """A class of models, and its smallest config."""

    model: str
    config: str
    words: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False
    """Whether labels stand where they are predicted."""
    reference: str = "sdpa"
    """What transformers implements all of it by."""
    trains: bool = True
    """False: its forward draws in training."""


FAMILIES = {
    "opt": Family("OPTForCausalLM", "OPTConfig", {**LLAMA, **OPT}),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", GPT),
    "codegen": Family("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "n_head": 8, "n_embd": 64}),
    "gpt_neo": Family(
        "GPTNeoForCausalLM", "GPTNeoConfig", {**NEO, **NEO_KINDS, **UNDROPPED, "embed_dropout": 0.0}
    ),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", LLAMA),
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
    "exaone4": Family(  # three layers of four have a window, and all have the attribute
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**LLAMA, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 4},
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
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER, masked=True),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER, masked=True),
    "xlm_roberta": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER, masked=True),
    "camembert": Family("CamembertForMaskedLM", "CamembertConfig", ENCODER, masked=True),
    "modernbert": Family(
        "ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, **MODERN}, masked=True
    ),
}


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


def build(family: Family, implementation: str = "sdpa", **more: Any) -> nn.Module:
    """A float64 model; random, the same every time."""
    if not hasattr(tf, family.model):
        pytest.skip(f"transformers {tf.__version__} has no {family.model}")
    with BUILDING:
        torch.manual_seed(1)
        config = getattr(tf, family.config)(**{**family.words, "initializer_range": 0.2, **more})
        make = getattr(tf, family.model)
        config._experts_implementation = "eager"  # of transformers 5, whose others know no float64
        config._attn_implementation = implementation if make._supports_sdpa else "eager"
        model = make(config)
    return model.double().train(family.trains)


def batch(size: int = 2, seqlen: int = SEQLEN) -> dict[str, Any]:
    ids = torch.randint(5, VOCAB, (size, seqlen), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def alone(family: Family, model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """(logits, loss, gradients) of the model as its users call it."""
    whole = prepare_batch(given, multiple=1, labels_are_shifted=family.masked)
    with NoFloat32():
        logits = model(**{k: v for k, v in given.items() if k != "labels"}).logits
    loss = token_loss(logits, whole["labels"], count_valid(whole["labels"]))
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


def copied(model: nn.Module) -> nn.Module:
    """A copy of an attached model, which nothing of the model itself reaches: that holds NaN."""
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return twin


def on_ranks(
    family: Family,
    size: int,
    given: dict[str, Any],
    name: str = "sdpa",
    twin: bool = False,
    **more: Any,
) -> Any:
    """[(logits of all tokens, share of the loss, gradients)] by rank.

    Args:
        twin: whether a copy of the attached model is run.
    """
    models = [build(family, name, **more) for _ in range(size)]

    def rank(comm: Any) -> tuple[Tensor, Tensor, Any]:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False), NoFloat32():
            model = copied(model) if twin else model
            local = sp.shard_batch(given, labels_are_shifted=family.masked)
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
            loss = sp.loss(logits, local["labels"])
            loss.backward()
            full = sp.unshard(logits.detach(), dim=1)
        return full, loss.detach(), gradients(model)

    return run_threads(size, rank)


def assert_equal(
    family: Family,
    size: int,
    given: dict[str, Any],
    name: str = "sdpa",
    twin: bool = False,
    **more: Any,
) -> None:
    """Logits, loss and every gradient are those of one device to 1e-9."""
    logits, loss, wanted = alone(family, build(family, family.reference, **more), given)
    found = on_ranks(family, size, given, name, twin, **more)
    for full, _, _ in found:
        assert_close(full[:, : logits.shape[1]], logits, "logits")
    assert_close(sum(share for _, share, _ in found), loss, "loss")
    for parameter, gradient in wanted.items():
        assert_close(sum(own[parameter] for _, _, own in found), gradient, parameter)
