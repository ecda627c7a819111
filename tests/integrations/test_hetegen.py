"""HeteGen and AutoChunk as blocks of the config of `wf_deepspeed.init_inference`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)

import deepspeed  # noqa: E402

import wf_deepspeed  # noqa: E402
from tests.hetegen.models import fast_device, generate, make_model, max_memory  # noqa: E402

pytestmark = pytest.mark.deepspeed

IDS = torch.arange(3, 12).unsqueeze(0)
LONG_IDS = torch.arange(3, 51).unsqueeze(0)  # a prompt whose activations AutoChunk can reduce
NUM_TOKENS = 4
AUTOCHUNK = {"max_memory": 90_000, "max_slowdown": 100.0, "seqlen": 48}


def deepspeed_memory(model: torch.nn.Module) -> dict[str, Any]:
    """max_memory with which a model is split, as JSON has it: with keys that are strings."""
    return {str(key): value for key, value in max_memory(model, 0.5).items()}


@pytest.mark.parametrize("form", ["dict", "file"])
def test_init_inference_splits_the_model_and_destroy_restores_it(form: str, tmp_path: Path) -> None:
    model = make_model("gpt2")
    expected = generate(model, IDS, NUM_TOKENS)
    block = {"alpha": "auto", "pin_memory": True, "prefetch": 2}
    block["max_memory"] = deepspeed_memory(model)
    config: Any = {"wallfacer": {"hetegen": block}}
    if form == "file":
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        config = file
    engine = wf_deepspeed.init_inference(model, config, device=fast_device())
    assert engine.hetegen.plan.slabs == 4  # prefetch + 2
    assert torch.equal(generate(engine, IDS, NUM_TOKENS), expected)
    engine.destroy()
    assert torch.equal(generate(model, IDS, NUM_TOKENS), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, 'device=.* is for "wallfacer.hetegen", which is not given'),
        ({"wallfacer": {"autochunk": {"max_memory": "1MB"}}}, "device=.*, which is not given"),
        ({"wallfacer": {"hetegen": True}}, '"wallfacer.hetegen" must be a block'),
        ({"wallfacer": True}, '"wallfacer" must be a block'),
        ({"wallfacer": {"hetegen": {"max_memori": {}}}}, "did you mean 'max_memory'"),
        ({"wallfacer": {"hetegen": {"alpha": 0.5}}}, 'must have "max_memory"'),
        ({"wallfacer": {"hetegen": {"max_memory": {"0": "a lot"}}}}, "'a lot'"),
    ],
)
def test_a_wrong_wallfacer_block_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wf_deepspeed.init_inference(make_model("gpt2"), config, device=fast_device())


def test_a_block_for_training_beside_hetegen_is_refused() -> None:
    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}, "checkpointing": {}}}
    with pytest.raises(NotImplementedError, match=r"and \"autochunk\", got \['checkpointing'\]"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)


def test_options_of_deepspeeds_engine_beside_hetegen_are_refused() -> None:
    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}}, "dtype": torch.float32}
    with pytest.raises(NotImplementedError, match="no engine of DeepSpeed.s, .*dtype"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)


def test_option_that_contradicts_the_config_is_refused_as_by_deepspeed() -> None:
    config = {"wallfacer": {"autochunk": {"max_memory": "1GB"}}, "dtype": torch.float32}
    with pytest.raises(ValueError, match="Conflicting argument 'dtype'"):
        wf_deepspeed.init_inference(make_model("gpt2"), config, dtype=torch.bfloat16)


def test_without_our_block_init_inference_is_that_of_deepspeed() -> None:
    model = make_model("llama", "eager")
    engine = wf_deepspeed.init_inference(model, {"dtype": torch.float32})
    assert isinstance(engine, deepspeed.InferenceEngine) and engine.module is model


def test_autochunk_keeps_its_budget_in_deepspeeds_own_engine() -> None:
    model = make_model("llama", "eager")
    expected = generate(model, LONG_IDS, NUM_TOKENS)
    config = {"wallfacer": {"autochunk": AUTOCHUNK}}
    engine = wf_deepspeed.init_inference(model, config, dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine)
    plan = engine.module.plan
    assert plan.regions and plan.peak <= AUTOCHUNK["max_memory"] < plan.peak_before
    assert torch.equal(generate(engine, LONG_IDS, NUM_TOKENS), expected)


def test_autochunk_and_hetegen_in_one_block_keep_both_budgets() -> None:
    model, device = make_model("llama", "eager"), fast_device()
    expected = generate(model, LONG_IDS, NUM_TOKENS)
    memory = deepspeed_memory(model)
    config = {"wallfacer": {"hetegen": {"max_memory": memory}, "autochunk": AUTOCHUNK}}
    engine = wf_deepspeed.init_inference(model, config, device=device)
    assert torch.equal(generate(engine, LONG_IDS, NUM_TOKENS), expected)
    plan = engine.module.plan
    assert plan.regions and plan.peak <= AUTOCHUNK["max_memory"] < plan.peak_before
    assert device.peak_bytes <= memory["0"]
    engine.destroy()
    assert torch.equal(generate(model, LONG_IDS, NUM_TOKENS), expected)


@pytest.mark.parametrize("budget", [10, 40_000])  # without a key-value cache 32 kB are enough
def test_an_autochunk_budget_that_no_plan_keeps_is_refused_and_the_model_is_restored(
    budget: int,
) -> None:
    model = make_model("llama", "eager")
    expected = generate(model, LONG_IDS, NUM_TOKENS)
    block = {
        "hetegen": {"max_memory": deepspeed_memory(model)},
        "autochunk": AUTOCHUNK | {"max_memory": budget},
    }
    with pytest.raises(ValueError, match=f"max_memory={budget} bytes: no plan fits"):
        wf_deepspeed.init_inference(model, {"wallfacer": block}, device=fast_device())
    assert torch.equal(generate(model, LONG_IDS, NUM_TOKENS), expected)
