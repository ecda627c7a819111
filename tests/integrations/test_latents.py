"""DeepSeek-V3 that sends latents in place of keys and values is exact, and sends fewer bytes.

The reference is the same model on one device, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from torch import nn  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    MLA,
    NoFloat32,
    batch,
    build,
    run_on_one_device,
)
from tests.integrations.results import Result, assert_shares_sum_to, run_on_shard  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers import ModelOptions  # noqa: E402

DEEPSEEK = FAMILIES["deepseek_v3"]
NUM_HEADS = 4
KEY_DIM = MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]
LATENT_WIDTH = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
"""A row's latents, and the rotary part of its key, which all heads share."""
RING = {"route": {"name": "ring"}}
ULYSSES = {"route": "ring", "ulysses_degree": 2}


def run_on_ranks(
    size: int,
    build_model: Callable[[], nn.Module],
    latents: bool = True,
    options: dict[str, Any] = RING,
) -> list[tuple[Result, dict[str, int]]]:
    """(result, bytes that attention sent) of each rank."""
    models = [build_model() for _ in range(size)]

    def rank(comm: Any) -> tuple[Result, dict[str, int]]:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **options})
        sp, model = SequenceParallel(config, comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False, latents=latents), NoFloat32():
            local = sp.shard_batch(batch())
            sp.report()
            result = run_on_shard(model, sp, local)
        sent = {k: n for k, n in sp.report().items() if k.startswith(("forward", "backward"))}
        del sent["forward unshard"]  # of the logits
        return result, sent

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("options", "config_changes"),
    [
        pytest.param(RING, {"q_lora_rank": 16}, id="ring"),
        pytest.param(
            RING,
            {"q_lora_rank": None},
            id="queries_without_latents",
            marks=pytest.mark.skipif(tf.__version__ < "5", reason="needs a q_lora_rank here"),
        ),
        pytest.param(ULYSSES, {"q_lora_rank": 5, "rope_interleave": False}, id="ulysses"),
        pytest.param({"route": "auto"}, {"attention_bias": True}, id="auto_with_bias"),
    ],
)
def test_loss_and_gradients_are_exact(
    size: int, options: dict[str, Any], config_changes: dict[str, Any]
) -> None:
    expected = run_on_one_device(DEEPSEEK, build(DEEPSEEK, **config_changes), batch())
    assert "model.layers.0.self_attn.kv_b_proj.weight" in expected.grads  # latents to keys, values
    ranks = run_on_ranks(size, lambda: build(DEEPSEEK, **config_changes), options=options)
    assert_shares_sum_to(expected, [result for result, _ in ranks])


def test_gradients_of_lora_on_the_projection_of_latents_are_exact() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["kv_b_proj"], r=4, init_lora_weights=False)

    def with_adapters() -> nn.Module:
        return peft.get_peft_model(build(DEEPSEEK), config).double()  # type: ignore[arg-type]

    state = with_adapters().state_dict()

    def build_model() -> nn.Module:
        model = with_adapters()
        model.load_state_dict(state)
        return model

    expected = run_on_one_device(DEEPSEEK, build_model(), batch())
    assert any("kv_b_proj.lora_A" in name for name in expected.grads)
    assert_shares_sum_to(expected, [result for result, _ in run_on_ranks(2, build_model)])


def test_weights_that_are_plain_tensors_are_exact() -> None:
    """FSDP1 makes them so while layers run again in the backward."""

    def build_model() -> nn.Module:
        model: Any = build(DEEPSEEK)
        for layer in model.model.layers:
            weight = layer.self_attn.kv_b_proj.weight
            del layer.self_attn.kv_b_proj.weight
            layer.self_attn.kv_b_proj.weight = weight.detach()
        return model

    expected = run_on_one_device(DEEPSEEK, build_model(), batch())
    assert_shares_sum_to(expected, [result for result, _ in run_on_ranks(2, build_model)])


@pytest.mark.parametrize("size", [2, 4])
def test_latents_need_fewer_bytes_by_the_ratio_of_the_widths(size: int) -> None:
    key_value_width = NUM_HEADS * (KEY_DIM + MLA["v_head_dim"])
    with_latents = run_on_ranks(size, lambda: build(DEEPSEEK))
    without = run_on_ranks(size, lambda: build(DEEPSEEK), latents=False)
    for (_, latent_bytes), (_, key_value_bytes) in zip(with_latents, without, strict=True):
        assert latent_bytes and latent_bytes.keys() == key_value_bytes.keys()
        for label, count in key_value_bytes.items():
            assert count * LATENT_WIDTH == latent_bytes[label] * key_value_width, label


@pytest.mark.parametrize("num_latents", [12, 24, 47])
def test_verify_passes(num_latents: int) -> None:
    """Also with as many latents as a rank (24) or the random batch (47) has tokens."""
    models = [build(DEEPSEEK, kv_lora_rank=num_latents).float() for _ in range(2)]

    def rank(comm: Any) -> Any:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": 2, **RING})
        sp, model = SequenceParallel(config, comm), models[comm.rank]
        attach_model = partial(wf_transformers.attach_model, model, sp)
        attached = partial(ModelOptions(latents=True).attached, model, attach_model)
        return wf_transformers.verify(model, sp, attached, "strict")

    assert run_threads(2, rank)[0] is not None


def test_remove_restores_the_model() -> None:
    model, ids = build(DEEPSEEK).float(), batch()["input_ids"]
    expected = model(ids).logits
    with wf_transformers.attach(model, one_rank(), latents=True):
        torch.testing.assert_close(model(ids).logits, expected)
        assert any("wallfacer" in vars(module) for module in model.modules())
    assert not any({"wallfacer", "forward"} & set(vars(module)) for module in model.modules())
    assert torch.equal(model(ids).logits, expected)


def one_rank() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig())


def test_the_option_is_a_boolean() -> None:
    assert ModelOptions.split({"latents": True})[1] == ModelOptions(latents=True)
    with pytest.raises(ValueError, match='"latents" must be true or false, got 3'):
        ModelOptions.split({"latents": 3})


def test_a_model_without_latents_is_refused_and_restored() -> None:
    model: Any = build(FAMILIES["stablelm"])
    with pytest.raises(ValueError, match='"latents": true .* StableLmForCausalLM has none'):
        wf_transformers.attach(model, one_rank(), latents=True)
    assert model.config._attn_implementation == "sdpa"


def test_latents_beside_dsp_are_refused() -> None:
    """DSP's handle has registered no attention."""
    handle = wf_transformers.Handle(one_rank())
    with pytest.raises(ValueError, match='not beside "dsp"'):
        ModelOptions(latents=True).attached(build(DEEPSEEK), lambda: handle)


def test_dropout_between_latents_and_keys_is_refused() -> None:
    """The projection is used as a matrix: dropout would drop weights, not values of tokens."""
    model: Any = build(DEEPSEEK).float()
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = nn.Sequential(nn.Dropout(0.5), attention.kv_b_proj)
    with (
        wf_transformers.attach(model, one_rank(), latents=True),
        pytest.raises(NotImplementedError, match="kv_b_proj without dropout"),
    ):
        model(batch()["input_ids"])
