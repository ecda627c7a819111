"""HeteGen on models that are mapped from a folder, and as a block of DeepSpeed's config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is missing")
pytest.importorskip("accelerate", reason="the accelerate extra is missing")


from tests.hetegen.models import (  # noqa: E402
    CONFIGS,
    fast_device,
    generate,
    make_model,
    max_memory,
)
from wf_backends.hetegen import ShapedDevice, dispatch_model  # noqa: E402
from wf_transformers import model_from_folder  # noqa: E402

IDS = torch.arange(3, 12).unsqueeze(0)
LONG_IDS = torch.arange(3, 51).unsqueeze(0)  # a prompt whose activations AutoChunk can reduce
NUM_TOKENS = 4
AUTOCHUNK = {"max_memory": 90_000, "max_slowdown": 100.0, "seqlen": 48}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_from_a_folder_generates_the_same_tokens_whole_and_split(
    name: str, tmp_path: Path
) -> None:
    model = make_model(name)
    expected = generate(model, IDS, NUM_TOKENS)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    mapped = model_from_folder(tmp_path)
    assert torch.equal(generate(mapped, IDS, NUM_TOKENS), expected)
    with dispatch_model(mapped, max_memory(mapped, 0.5), fast_device()):
        assert torch.equal(generate(mapped, IDS, NUM_TOKENS), expected)


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_weights_of_a_folder_stay_mapped_and_take_no_memory(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3,
        num_attention_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    before = anonymous_bytes()
    mapped = model_from_folder(tmp_path)
    assert anonymous_bytes() - before < size / 4
    assert sum(p.nbytes for p in mapped.parameters()) == size > 180e6
    device, ids = ShapedDevice(1e10, 1e10, 1e11), torch.ones(1, 3, dtype=torch.long)
    with dispatch_model(mapped, {0: size // 5}, device), torch.no_grad():
        mapped(ids)
        device_bytes = device.bytes + device.pinned_bytes  # this process's memory, too
        assert anonymous_bytes() - before < device_bytes + size / 4


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*.safetensors files"):
        model_from_folder(tmp_path)


def test_a_folder_with_the_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    make_model("gpt2").config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="does not hold a GPT2LMHeadModel.*missing.*unknown"):
        model_from_folder(tmp_path)


def save_in_shards(model: Any, folder: Path) -> list[Path]:
    model.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("max_shard_size", ["60KB", "5GB"], ids=["other shards", "one file"])
def test_files_of_an_earlier_save_are_ignored(max_shard_size: str, tmp_path: Path) -> None:
    model, earlier_model = make_model("llama"), make_model("llama")
    with torch.no_grad():
        for parameter in earlier_model.parameters():
            parameter.mul_(1.5)
    earlier_files = save_in_shards(earlier_model, tmp_path)
    assert len(earlier_files) > 2
    earlier_files.append(tmp_path / "model.safetensors.index.json")
    contents = {file: file.read_bytes() for file in earlier_files}

    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)  # type: ignore[operator]
    for file, content in contents.items():  # save_pretrained removes them
        if not file.exists():
            file.write_bytes(content)

    state = model.state_dict()
    for name, value in model_from_folder(tmp_path).state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_error_names_a_truncated_file(tmp_path: Path) -> None:
    file, *_ = save_in_shards(make_model("llama"), tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{file.name} cannot be read"):
        model_from_folder(tmp_path)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    _, file, *_ = save_in_shards(make_model("llama"), tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=rf"lacks \['{file.name}'\], which .*index.json names"):
        model_from_folder(tmp_path)


def test_an_index_without_files_is_refused(tmp_path: Path) -> None:
    save_in_shards(make_model("llama"), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json names no files"):
        model_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 80}, "does not hold what its config says.*size mismatch"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "holds quantized weights, .*gptq",
        ),
    ],
    ids=["size", "quantized"],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        model_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config_dtype", "argument", "expected"),
    [
        ("bfloat16", {}, torch.bfloat16),
        ("float32", {}, torch.float32),
        ("bfloat16", {"torch_dtype": torch.float32}, torch.float32),
    ],
    ids=["bfloat16", "float32", "torch_dtype"],
)
def test_all_weights_have_the_dtype_of_the_config_or_of_torch_dtype(
    config_dtype: str, argument: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    """As with from_pretrained(torch_dtype="auto"), also where files hold several dtypes."""
    model = make_model("llama").bfloat16()
    model.lm_head.float()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5, 4
    file.write_text(json.dumps(config | {key: config_dtype}))
    mapped = model_from_folder(tmp_path, **argument)
    with dispatch_model(mapped, max_memory(mapped, 0.5), fast_device()):
        generate(mapped, IDS, NUM_TOKENS)
    assert {parameter.dtype for parameter in mapped.parameters()} == {expected}


def test_a_torch_dtype_that_is_a_string_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match="torch_dtype must be such as torch.bfloat16.*'bf16'"):
        model_from_folder(tmp_path, torch_dtype="bf16")  # type: ignore[arg-type]


def deepspeed_memory(model: torch.nn.Module) -> dict[str, Any]:
    """max_memory with which a model is split, as JSON has it: with keys that are strings."""
    return {str(key): value for key, value in max_memory(model, 0.5).items()}


@pytest.mark.deepspeed
@pytest.mark.parametrize("form", ["dict", "file"])
def test_init_inference_splits_the_model_and_destroy_restores_it(form: str, tmp_path: Path) -> None:
    import wf_deepspeed

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


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, 'device=.* is for "wallfacer.hetegen", which is not given'),
        ({"wallfacer": {"hetegen": True}}, '"wallfacer.hetegen" must be a block'),
        ({"wallfacer": True}, '"wallfacer" must be a block'),
        ({"wallfacer": {"hetegen": {"max_memori": {}}}}, "did you mean 'max_memory'"),
        ({"wallfacer": {"hetegen": {"alpha": 0.5}}}, 'must have "max_memory"'),
        ({"wallfacer": {"hetegen": {"max_memory": {"0": "a lot"}}}}, "'a lot'"),
    ],
)
def test_a_wrong_wallfacer_block_is_refused(config: dict, message: str) -> None:
    import wf_deepspeed

    with pytest.raises(ValueError, match=message):
        wf_deepspeed.init_inference(make_model("gpt2"), config, device=fast_device())


@pytest.mark.deepspeed
def test_a_block_for_training_beside_hetegen_is_refused() -> None:
    import wf_deepspeed

    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}, "checkpointing": {}}}
    with pytest.raises(NotImplementedError, match=r"and \"autochunk\", got \['checkpointing'\]"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)


@pytest.mark.deepspeed
def test_options_of_deepspeeds_engine_beside_hetegen_are_refused() -> None:
    import wf_deepspeed

    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}}, "dtype": torch.float32}
    with pytest.raises(NotImplementedError, match="no engine of DeepSpeed.s, .*dtype"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)


@pytest.mark.deepspeed
def test_without_our_block_init_inference_is_that_of_deepspeed() -> None:
    import deepspeed

    import wf_deepspeed

    model = make_model("llama", "eager")
    engine = wf_deepspeed.init_inference(model, {"dtype": torch.float32})
    assert isinstance(engine, deepspeed.InferenceEngine) and engine.module is model


@pytest.mark.deepspeed
def test_autochunk_keeps_its_budget_in_deepspeeds_own_engine() -> None:
    import deepspeed

    import wf_deepspeed

    model = make_model("llama", "eager")
    expected = generate(model, LONG_IDS, NUM_TOKENS)
    config = {"wallfacer": {"autochunk": AUTOCHUNK}}
    engine = wf_deepspeed.init_inference(model, config, dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine)
    plan = engine.module.plan
    assert plan.regions and plan.peak <= AUTOCHUNK["max_memory"] < plan.peak_before
    assert torch.equal(generate(engine, LONG_IDS, NUM_TOKENS), expected)


@pytest.mark.deepspeed
def test_autochunk_and_hetegen_in_one_block_keep_both_budgets() -> None:
    import wf_deepspeed

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


@pytest.mark.deepspeed
@pytest.mark.parametrize("budget", [10, 40_000])  # without a key-value cache 32 kB are enough
def test_an_autochunk_budget_that_no_plan_keeps_is_refused_and_the_model_is_restored(
    budget: int,
) -> None:
    import wf_deepspeed

    model = make_model("llama", "eager")
    expected = generate(model, LONG_IDS, NUM_TOKENS)
    block = {
        "hetegen": {"max_memory": deepspeed_memory(model)},
        "autochunk": AUTOCHUNK | {"max_memory": budget},
    }
    with pytest.raises(ValueError, match=f"max_memory={budget} bytes: no plan fits"):
        wf_deepspeed.init_inference(model, {"wallfacer": block}, device=fast_device())
    assert torch.equal(generate(model, LONG_IDS, NUM_TOKENS), expected)
