"""HeteGen through DeepSpeed's configuration, and models mapped from a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is missing")
pytest.importorskip("accelerate", reason="the accelerate extra is missing")


from tests.hetegen.models import CONFIGS, fast_device, make_model, split_memory  # noqa: E402
from wf_backends.hetegen import ShapedDevice, dispatch_model  # noqa: E402
from wf_transformers import model_from_folder  # noqa: E402

IDS = torch.arange(3, 12).unsqueeze(0)
WORDS = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "pad_token_id": 0}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_from_a_folder_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    expected = model.generate(IDS, **WORDS)  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    mapped = model_from_folder(tmp_path)
    assert torch.equal(mapped.generate(IDS, **WORDS), expected)  # type: ignore[operator]
    with dispatch_model(mapped, split_memory(mapped, 0.5), fast_device()):
        assert torch.equal(mapped.generate(IDS, **WORDS), expected)  # type: ignore[operator]


def own_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_weights_of_a_folder_are_not_read_into_memory(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3,
        num_attention_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    before = own_bytes()
    mapped = model_from_folder(tmp_path)
    assert own_bytes() - before < size / 4
    assert sum(p.nbytes for p in mapped.parameters()) == size > 180e6
    device, ids = ShapedDevice(1e10, 1e10, 1e11), torch.ones(1, 3, dtype=torch.long)
    with dispatch_model(mapped, {0: size // 5}, device), torch.no_grad():
        mapped(ids)
        taken = device.bytes + device.pinned_bytes  # of a thread that stands for an accelerator
        assert own_bytes() - before < taken + size / 4


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*.safetensors files"):
        model_from_folder(tmp_path)
    model = make_model("llama")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    make_model("gpt2").config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="does not hold a GPT2LMHeadModel.*missing.*unknown"):
        model_from_folder(tmp_path)


def save_in_shards(model: Any, folder: Path) -> list[Path]:
    model.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("*.safetensors"))


def same_weights(one: Any, other: Any) -> bool:
    state = other.state_dict()
    return all(torch.equal(x, state[key]) for key, x in one.state_dict().items())


def test_files_of_an_earlier_save_are_not_mixed_in(tmp_path: Path) -> None:
    earlier, model = make_model("llama"), make_model("llama")
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.mul_(1.5)
    assert len(save_in_shards(earlier, tmp_path)) > 2
    index = (tmp_path / "model.safetensors.index.json").read_text()
    saved = {file.name: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    model.save_pretrained(tmp_path, max_shard_size="60KB")  # type: ignore[operator]
    for name, data in saved.items():  # of another number of shards
        (tmp_path / name).write_bytes(data)
    assert same_weights(model_from_folder(tmp_path), model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    assert same_weights(model_from_folder(tmp_path), model)


def test_files_that_are_missing_or_cut_off_are_named(tmp_path: Path) -> None:
    first, second, *_ = save_in_shards(make_model("llama"), tmp_path)
    data = first.read_bytes()
    first.write_bytes(data[:100])
    with pytest.raises(ValueError, match=f"{first.name} cannot be read"):
        model_from_folder(tmp_path)
    first.write_bytes(data)
    second.unlink()
    with pytest.raises(ValueError, match=rf"lacks \['{second.name}'\], which .*index.json names"):
        model_from_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json names no files"):
        model_from_folder(tmp_path)


def test_a_config_that_is_not_of_these_weights_is_told(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ValueError, match="does not hold what its config says.*size mismatch"):
        model_from_folder(tmp_path)
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="holds quantized weights, .*gptq"):
        model_from_folder(tmp_path)


def test_the_type_of_a_folders_model(tmp_path: Path) -> None:
    """Its config's, as from_pretrained(torch_dtype="auto") has it, or what is asked for."""
    model = make_model("llama").bfloat16()
    model.lm_head.float()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def types(said: str | None, **words: Any) -> set[torch.dtype]:
        word = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5, 4
        file.write_text(json.dumps(config | {word: said}))
        found = model_from_folder(tmp_path, **words)
        with dispatch_model(found, split_memory(found, 0.5), fast_device()):
            found.generate(IDS, **WORDS)  # type: ignore[operator]
        return {parameter.dtype for parameter in found.parameters()}

    assert types("bfloat16") == {torch.bfloat16}
    assert types("float32") == {torch.float32}
    assert types("bfloat16", torch_dtype=torch.float32) == {torch.float32}
    with pytest.raises(ValueError, match="torch_dtype must be such as torch.bfloat16.*'bf16'"):
        model_from_folder(tmp_path, torch_dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.deepspeed
def test_init_inference(tmp_path: Path) -> None:
    import wf_deepspeed

    model = make_model("gpt2")
    expected = model.generate(IDS, **WORDS)  # type: ignore[operator]
    memory = {str(key): value for key, value in split_memory(model, 0.5).items()}
    block = {"max_memory": memory, "alpha": "auto", "pin_memory": True, "prefetch": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"wallfacer": {"hetegen": block}}))
    for config in (json.loads(file.read_text()), file):
        engine = wf_deepspeed.init_inference(model, config, device=fast_device())
        assert engine.hetegen.plan.slabs == 4
        assert torch.equal(engine.generate(IDS, **WORDS), expected)
        engine.destroy()
    assert torch.equal(model.generate(IDS, **WORDS), expected)  # type: ignore[operator]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({}, 'device=.* is for "wallfacer.hetegen", which is not given'),
        ({"wallfacer": {"hetegen": True}}, '"wallfacer.hetegen" must be a block'),
        ({"wallfacer": True}, '"wallfacer" must be a block'),
        ({"wallfacer": {"hetegen": {"max_memori": {}}}}, "did you mean 'max_memory'"),
        ({"wallfacer": {"hetegen": {"alpha": 0.5}}}, 'must have "max_memory"'),
        ({"wallfacer": {"hetegen": {"max_memory": {"0": "a lot"}}}}, "'a lot'"),
    ],
)
def test_bad_blocks_are_refused(block: dict, told: str) -> None:
    import wf_deepspeed

    with pytest.raises(ValueError, match=told):
        wf_deepspeed.init_inference(make_model("gpt2"), block, device=fast_device())


@pytest.mark.deepspeed
def test_what_else_stands_in_the_block_is_refused() -> None:
    import wf_deepspeed

    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}, "checkpointing": {}}}
    with pytest.raises(NotImplementedError, match=r"and \"autochunk\", got \['checkpointing'\]"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)
    config = {"wallfacer": {"hetegen": {"max_memory": {"0": 1}}}, "dtype": torch.float32}
    with pytest.raises(NotImplementedError, match="no engine of DeepSpeed.s, .*dtype"):
        wf_deepspeed.init_inference(make_model("gpt2"), config)


@pytest.mark.deepspeed
def test_autochunk_in_deepspeeds_own_engine() -> None:
    """Its signature, its engine, our slices: the same tokens within a budget."""
    import deepspeed

    import wf_deepspeed

    model, ids = make_model("llama", "eager"), torch.arange(3, 51).unsqueeze(0)
    words = WORDS | {"attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **words)  # type: ignore[operator]
    plain = wf_deepspeed.init_inference(model, {"dtype": torch.float32})
    assert isinstance(plain, deepspeed.InferenceEngine) and plain.module is model
    block = {"autochunk": {"max_memory": 90_000, "max_slowdown": 100.0, "seqlen": 48}}
    engine = wf_deepspeed.init_inference(model, {"wallfacer": block}, dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine) and engine.module.plan.regions
    assert engine.module.plan.peak <= 90_000 < engine.module.plan.peak_before
    assert torch.equal(engine.generate(ids, **words), expected)


@pytest.mark.deepspeed
def test_autochunk_beside_hetegen_in_one_block() -> None:
    import wf_deepspeed

    model, ids = make_model("llama", "eager"), torch.arange(3, 51).unsqueeze(0)
    words = WORDS | {"attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **words)  # type: ignore[operator]
    memory = {str(key): value for key, value in split_memory(model, 0.5).items()}
    budget = {"max_memory": 90_000, "max_slowdown": 100.0, "seqlen": 48}
    block = {"hetegen": {"max_memory": memory}, "autochunk": budget}
    device = fast_device()
    engine = wf_deepspeed.init_inference(model, {"wallfacer": block}, device=device)
    assert engine.module.plan.regions
    assert torch.equal(engine.generate(ids, **words), expected)
    assert engine.module.plan.peak <= 90_000 < engine.module.plan.peak_before
    assert device.peak_bytes <= int(memory["0"])
    engine.destroy()
    for size in (10, 40_000):  # without a cache, 32 kB are enough
        block["autochunk"] = budget | {"max_memory": size}
        with pytest.raises(ValueError, match=f"max_memory={size} bytes: no plan fits"):
            wf_deepspeed.init_inference(model, {"wallfacer": block}, device=fast_device())
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]
