"""Models with convolutions and recurrences on ranks give what they give on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import copied  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILDING,
    SEQLEN,
    VOCAB,
    assert_close,
    batch,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_backends.parallel.data import prepare_batch  # noqa: E402
from wf_backends.parallel.loss import count_valid, token_loss  # noqa: E402

MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
MAMBA2 = {**MAMBA, "num_heads": 16, "head_dim": 4, "chunk_size": 8}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "mamba_d_state": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
TINY = {**SIZES, **HEADS, "use_mamba_kernels": False}
ZAMBA2 = {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2, "n_mamba_heads": 8}
LAYERS = {"attn_layer_period": 2, "num_hidden_layers": 4}  # Zamba's first three are fixed
ZAMBA = {**LAYERS, "attn_layer_offset": 0}
EXPERTS = {"num_experts": 2, "expert_layer_offset": 1, "expert_layer_period": 4}
JAMBA = {**LAYERS, **EXPERTS, "attn_layer_offset": 1}
GRIFFIN = {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 48}
BAMBA = {"attn_layer_indices": [1], "num_hidden_layers": 2, "mamba_chunk_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**MAMBA, "time_step_rank": 3}),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "time_step_rank": 3}),
    "mamba2": ("Mamba2", {**MAMBA2, "n_groups": 8}),
    "mamba2, 2 groups": ("Mamba2", {**MAMBA2, "n_groups": 2}),
    "mamba2, 1 group": ("Mamba2", {**MAMBA2, "n_groups": 1}),
    "zamba": ("Zamba", {**TINY, **ZAMBA, "n_mamba_heads": 4, "mamba_dt_rank": 3}),
    "jamba": ("Jamba", {**TINY, **JAMBA, "num_key_value_heads": 2, "mamba_dt_rank": 3}),
    "recurrent_gemma": ("RecurrentGemma", GRIFFIN),
    "zamba2": ("Zamba2", {**TINY, **ZAMBA2, "mamba_ngroups": 2, "chunk_size": 8}),
    "bamba": ("Bamba", {**TINY, **BAMBA, "mamba_n_heads": 8, "mamba_d_head": 8}),
}
DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 6, "head_dim": 8, "num_hidden_layers": 2, "num_experts": 0},
    "layer_types": ["linear_attention", "full_attention"],
}
if hasattr(tf, "Qwen3NextConfig"):
    FAMILIES["qwen3_next"] = ("Qwen3Next", {**SIZES, **HEADS, **DELTA})
if hasattr(tf, "Qwen3_5TextConfig"):
    FAMILIES["qwen3_5"] = ("Qwen3_5", {**SIZES, **HEADS, **DELTA})
HYBRID = {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_heads": 8}
if hasattr(tf, "GraniteMoeHybridConfig"):
    FAMILIES["granite_hybrid"] = (
        "GraniteMoeHybrid",
        {**SIZES, **HEADS, **HYBRID, "mamba_d_head": 8, "mamba_chunk_size": 8}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 48},
    )
if hasattr(tf, "NemotronHConfig"):
    FAMILIES["nemotron_h"] = (
        "NemotronH",
        {**SIZES, **HEADS, "layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8}
        | {"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 4, "chunk_size": 8}
        | {"n_groups": 2, "num_hidden_layers": 3},
    )
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0}
if hasattr(tf, "LaraMiniConfig"):
    FAMILIES["lara_mini"] = ("LaraMini", {**SIZES, **HEADS, **DELTA, **FOUR})
if hasattr(tf, "OlmoHybridConfig"):
    _delta = {**DELTA, "linear_num_value_heads": 4, "pad_token_id": 0}
    FAMILIES["olmo_hybrid"] = ("OlmoHybrid", {**SIZES, **HEADS, **_delta})
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}
LATENT |= {"q_lora_rank": 16, "linear_num_heads": 4, "linear_head_dim": 8, "num_hidden_layers": 2}
LATENT |= {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "topk_group": 1}
LATENT |= {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0}
for _family in ("KimiLinear", "BailingHybrid"):
    if hasattr(tf, f"{_family}Config"):
        FAMILIES[_family.lower()] = (_family, {**SIZES, **HEADS, **LATENT})
H1 = {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}
H1 |= {"mamba_n_groups": 2, "mamba_chunk_size": 8, "ssm_in_multiplier": 1.3}
H1 |= {"ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8], "attention_out_multiplier": 0.9}
if hasattr(tf, "FalconH1Config"):
    for _norm in (True, False):
        FAMILIES[f"falcon_h1, norm {_norm}"] = (
            "FalconH1",
            {**SIZES, **HEADS, **H1, "mamba_rms_norm": _norm},
        )
SHORT = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "pad_token_id": 0}
for _family in ("Lfm2", "Lfm3"):
    if hasattr(tf, f"{_family}Config"):
        FAMILIES[_family.lower()] = (_family, {**SIZES, **HEADS, **SHORT})
DOCUMENTS = (0, 5, 16, SEQLEN)


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def build(family: str, more: dict[str, Any] | None = None) -> Any:
    """A float64 model in training mode, every parameter of it random."""
    name, words = FAMILIES[family]
    with BUILDING:
        torch.manual_seed(1)
        kind = getattr(tf, f"{name}TextConfig", None) or getattr(tf, f"{name}Config")
        config = kind(**words | (more or {}))
        config._experts_implementation = "eager"  # transformers 5's grouped product has no float64
        model = getattr(tf, f"{name}ForCausalLM")(config).double().train()
        if hasattr(config, "num_attention_heads"):
            model.config._attn_implementation = "sdpa"  # Zamba's eager softmax is in float32
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def attached(family: str, comm: Any, layout: str = "zigzag") -> tuple[Any, Any, Any]:
    sp, model = sequence_parallel(comm, layout), build(family)
    with BUILDING:  # ranks of one process look for a free name
        return sp, model, wf_transformers.attach_model(model, sp)


def one_device(family: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, loss, gradients), document by document."""
    model, whole, ids = build(family), prepare_batch(given, multiple=1), given["input_ids"]
    borders = given.get("cu_seqlens") or (0, ids.shape[1])
    parts = zip(borders, borders[1:], strict=False)
    logits = torch.cat([model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in parts], 1)
    loss = token_loss(logits, whole["labels"], count_valid(whole["labels"]))
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


def assert_equal(
    family: str,
    size: int,
    given: dict[str, Any],
    layout: str = "zigzag",
    checkpoint: bool = False,
    valid: Any = ...,
    twin: bool = False,
) -> None:
    """Logits of `valid` tokens, loss and gradients to 1e-9."""
    logits, loss, wanted = one_device(family, given)

    def rank(comm: Any) -> Any:
        sp, model, handle = attached(family, comm, layout)
        model = copied(model) if twin else model
        if checkpoint:
            model.gradient_checkpointing_enable(handle.checkpoint_kwargs)
        local = sp.shard_batch(given)
        found = model(**wf_transformers.forward_kwargs(model, local)).logits
        share = sp.loss(found, local["labels"])
        share.backward()
        full = sp.unshard(found.detach(), 1, local.get("cu_seqlens"))
        return full[:, : logits.shape[1]], share.detach(), gradients(model)

    found = run_threads(size, rank)
    assert_close(found[0][0][valid], logits[valid], "logits")
    assert_close(sum(share for _, share, _ in found), loss, "loss")
    assert all(grads.keys() == wanted.keys() for *_, grads in found)
    for name, grad in wanted.items():
        assert_close(sum(grads[name] for *_, grads in found), grad, name)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixers(family: str, size: int) -> None:
    assert_equal(family, size, batch(2))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "zamba", "jamba", "recurrent_gemma"])
def test_a_copy_of_an_attached_model(family: str) -> None:
    assert_equal(family, 2, batch(2), twin=True)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@pytest.mark.parametrize(
    "family",
    [
        *("mamba", "mamba2", "zamba", "jamba", "recurrent_gemma"),
        *(name for name in ("qwen3_next", "nemotron_h", "lfm2") if name in FAMILIES),
    ],
)
def test_states_end_with_their_document(family: str, layout: str) -> None:
    assert_equal(family, 2, batch(cu_seqlens=DOCUMENTS), layout)


@pytest.mark.parametrize("family", ["mamba", "zamba2"])
def test_recomputed_layers_find_their_documents(family: str) -> None:
    assert_equal(family, 2, batch(cu_seqlens=DOCUMENTS), checkpoint=True)


def test_one_rank_has_documents_too() -> None:
    assert_equal("mamba", 1, batch(cu_seqlens=DOCUMENTS))


def test_padding_of_ragged_samples_reaches_no_token() -> None:
    mask = (torch.arange(SEQLEN)[None] < torch.tensor([[SEQLEN], [9]])).long()
    assert_equal("mamba", 4, batch(2, attention_mask=mask), valid=mask.bool())


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("mamba", 3, r"backbone.layers.0.mixer \(MambaMixer\): its 64 channels"),
        ("mamba2", 3, r"\(Mamba2Mixer\): its 16 heads"),
        ("recurrent_gemma", 3, r"\(RecurrentGemmaRecurrentBlock\): its 4 num_attention_heads"),
        ("zamba", 8, r"\(ZambaMambaMixer\): its 4 n_mamba_heads"),
    ],
)
def test_channels_that_do_not_divide_are_refused(family: str, size: int, message: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match=message):
            attached(family, comm)

    run_threads(size, rank)


def test_what_is_built_with_our_name_alone_is_refused() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("zamba")
        with wf_transformers.register(sp, f"wallfacer-{comm.rank}") as registration:
            model.config._attn_implementation = registration.name
            with pytest.raises(ValueError, match="mixes tokens .* wf_transformers.apply"):
                wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))

    run_threads(2, rank)


def test_parameters_that_the_table_does_not_know_are_refused() -> None:
    def rank(comm: Any) -> None:
        model = build("mamba")
        model.backbone.layers[1].mixer.adapter = torch.nn.Linear(2, 2)
        with pytest.raises(NotImplementedError, match="adapter.weight.* cannot be cut by channels"):
            with BUILDING:
                wf_transformers.attach_model(model, sequence_parallel(comm))
        assert "forward" not in vars(model.backbone.layers[0].mixer)  # taken back

    run_threads(2, rank)


def test_a_handle_gives_the_layers_back() -> None:
    given, family = batch(seqlen=24), "mamba"
    logits, _, _ = one_device(family, given)

    def rank(comm: Any) -> None:
        _, model, handle = attached(family, comm)
        with pytest.raises(NotImplementedError, match="called with a cache"):
            model.backbone.layers[0].mixer(torch.ones(1, 2, 32).double(), cache_params=object())
        handle.remove()
        assert_close(model(given["input_ids"], use_cache=False).logits, logits, "logits")

    run_threads(2, rank)


def test_channels_are_exchanged_once_each_way() -> None:
    """A layer sends the gate and its channels, gets the result back, and sums dt, B and C."""
    rows, channels, summed, item = 12, 64, 3 + 2 * 4, 8

    def rank(comm: Any) -> dict[str, int]:
        sp, model, _ = attached("mamba", comm)
        local = sp.shard_batch(batch(seqlen=2 * rows))
        sp.report()
        model(**wf_transformers.forward_kwargs(model, local))
        return sp.report()

    layers = 2
    for sent in run_threads(2, rank):
        assert sent["forward channels"] == layers * rows * channels * item
        assert sent["forward channels back"] == layers * rows * channels // 2 * item
        reduced = [sent[f"forward channels sum {step}"] for step in ("reduce", "gather")]
        assert reduced == [layers * rows * summed * item] * 2
