"""`model_from_folder` maps a saved model's weights, and refuses folders that do not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")
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
from wf_transformers.folders.load import generator  # noqa: E402

IDS = torch.arange(3, 12).unsqueeze(0)
NUM_TOKENS = 4


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


def test_name_of_a_hub_in_place_of_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="meta-llama/Llama-2-7b is no folder: download the model"):
        model_from_folder("meta-llama/Llama-2-7b")


def test_a_folder_with_the_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    make_model("gpt2").config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with pytest.raises(
        ValueError, match="does not hold a GPT2LMHeadModel as save_pretrained writes"
    ):
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
    removed = [file for file in earlier_files if not file.exists()]  # by save_pretrained
    assert len(removed) > 2
    for file in removed:
        file.write_bytes(contents[file])

    state, mapped_state = model.state_dict(), model_from_folder(tmp_path).state_dict()
    assert mapped_state.keys() == state.keys()
    for name, value in mapped_state.items():
        assert torch.equal(value, state[name]), name


def test_a_model_of_images_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a vit, which is no causal language model"):
        generator(tmp_path)


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


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write the folder's only file with the tensors that `change` returns."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def as_gpt2_of_the_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    base = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return base | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}


def as_llama2_of_the_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


@pytest.mark.parametrize(
    ("name", "change"),
    [("gpt2", as_gpt2_of_the_hub), ("llama", as_llama2_of_the_hub)],
    ids=["names of the base model", "a buffer of each layer"],
)
def test_names_and_buffers_of_old_files_of_the_hub_are_read_as_transformers_reads_them(
    name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    model = make_model(name)
    expected = generate(model, IDS, NUM_TOKENS)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    change_tensors(tmp_path, change)
    assert torch.equal(generate(model_from_folder(tmp_path), IDS, NUM_TOKENS), expected)


def test_a_head_that_transformers_5_renames_on_loading_is_read(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, eos_token_id=None,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).eval()
    expected = generate(model, IDS, NUM_TOKENS)
    model.save_pretrained(tmp_path)
    assert torch.equal(generate(model_from_folder(tmp_path), IDS, NUM_TOKENS), expected)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_error_names_missing_and_unknown_tensors(name: str, tmp_path: Path) -> None:
    """transformers fills missing ones at random; it converts Mixtral's since version 5."""
    make_model(name).save_pretrained(tmp_path)  # type: ignore[operator]
    change_tensors(tmp_path, lambda tensors: {"norm" if "model.norm" in key else key: tensor
                                              for key, tensor in tensors.items()})  # fmt: skip
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['norm'\]"):
        model_from_folder(tmp_path)


def test_without_a_dtype_in_the_config_weights_have_that_with_the_most_bytes(
    tmp_path: Path,
) -> None:
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    change_tensors(tmp_path, lambda tensors: {key: tensor if "norm" in key else tensor.bfloat16()
                                              for key, tensor in tensors.items()})  # fmt: skip
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: config[key] for key in config if "dtype" not in key}))
    model = model_from_folder(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    generate(model, IDS, NUM_TOKENS)
