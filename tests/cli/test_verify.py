"""`wallfacer verify`: a model of a folder on ranks, which are threads, beside the model alone."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

from wf_backends.cli import readers  # noqa: E402
from wf_backends.cli import verify as command  # noqa: E402

ON_FOUR = ("--sequence-parallel-size", "4")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 61}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed WallFacer registers it."""
    value = "wf_transformers.comparison.folder:verify_folder"
    point = EntryPoint("transformers", value, command.VERIFIERS)
    monkeypatch.setattr(readers, "entry_points", lambda group: [point])


def save_model(folder: Path, weights: bool, **sizes: int) -> str:
    """Save a small Llama, or its config alone; the folder."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | HEADS | sizes))
    if weights:
        model.save_pretrained(folder)
    else:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("weights", "args"), [(True, ()), (False, ("--ulysses-degree", "2", "--layout", "contiguous"))]
)
def test_an_exact_model_passes(wallfacer, tmp_path: Path, weights: bool, args: Any) -> None:
    code, out, err = wallfacer("verify", "--model", save_model(tmp_path, weights), *ON_FOUR, *args)
    drawn = "" if weights else " with random weights"
    assert code == 0, err
    assert out.splitlines()[-1].startswith(
        f"LlamaForCausalLM{drawn} on 4 ranks gives what it gives on one: "
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("LlamaModel", SMALL | HEADS),
        ("T5ForConditionalGeneration", T5_SIZES),
    ],
)
def test_a_model_without_a_head_and_an_encoder_with_a_decoder_are_compared(
    wallfacer, tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    config = getattr(transformers, name).config_class(**sizes, architectures=[name])
    config.save_pretrained(tmp_path)
    code, out, err = wallfacer("verify", "--model", str(tmp_path), *ON_FOUR)
    assert code == 0, err
    assert f"{name} with random weights on 4 ranks gives what it gives on one" in out


@pytest.mark.parametrize("weights", [False, True])
def test_the_first_layers_alone_are_compared(wallfacer, tmp_path: Path, weights: bool) -> None:
    one, three = (
        save_model(tmp_path / str(layers), weights, num_hidden_layers=layers) for layers in (1, 3)
    )
    reports = [
        wallfacer("verify", "--model", folder, *ON_FOUR, *args)[1].splitlines()[-1]
        for folder, args in ((one, ()), (three, ("--layers", "1")), (three, ()))
    ]
    counts = [report.partition("on one: ")[2].split()[0] for report in reports]
    assert counts[0] == counts[1] != counts[2], reports


def test_a_model_that_mixes_tokens_outside_of_attention_fails(
    wallfacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: mlp(self, x + x.roll(1, dims=1)))
    code, _, err = wallfacer("verify", "--model", save_model(tmp_path, False), *ON_FOUR)
    assert code == 1
    assert "what it gives on one: the output of model.layers.0.mlp.gate_proj is the first" in err


def test_a_bad_folder_and_bad_options_are_refused(wallfacer, tmp_path: Path) -> None:
    code, _, err = wallfacer("verify", "--model", str(tmp_path), *ON_FOUR)
    assert code == 2 and f"--model {tmp_path}: there is no config.json" in err
    model = ("verify", "--model", save_model(tmp_path, False))
    for size, bound in (("1", "at least 2, got 1"), ("257", "at most 256, got 257")):
        code, _, err = wallfacer(*model, "--sequence-parallel-size", size)
        assert code == 2 and f"--sequence-parallel-size must be {bound}" in err
    code, _, err = wallfacer(*model, *ON_FOUR, "--layers", "-1")
    assert code == 2 and "--layers must be at least 0, got -1" in err
    code, _, err = wallfacer(*model, *ON_FOUR, "--layout", "document_zigzag")
    assert code == 2 and "--layout must be one of ['zigzag', 'contiguous']" in err
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": "four"}))
    code, _, err = wallfacer(*model, *ON_FOUR)
    assert code == 2 and f"--model {tmp_path}: " in err and "must be a number, got 'four'" in err
