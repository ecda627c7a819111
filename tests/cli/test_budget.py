"""`wallfacer plan --model FOLDER --memory-gib 80`: a budget of a rank's memory after the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

from wf_transformers.folders import layers  # noqa: E402

ON_FOUR = ("--ranks", "4", "--seqlen", "32768")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the config of a Llama of about a billion parameters."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    transformers.LlamaConfig(hidden_size=2048, num_hidden_layers=16, **heads).save_pretrained(
        tmp_path
    )
    return str(tmp_path)


def test_the_budget_fits_80_columns(wallfacer, llama: str) -> None:
    code, out, err = wallfacer("plan", "--model", llama, "--memory-gib", "80", *ON_FOUR)
    assert code == 0, err
    budget = out[out.index("A rank's memory in training") :]
    assert max(len(line) for line in budget.splitlines() if line[0] in "┏┃┡│└") <= 80
    for text in ("optimizer states", "fits 80.0 GiB"):
        assert text in budget
    assert "ring" in budget.split("by forward route")[1]


def test_the_title_says_whether_layers_were_counted_or_formulas_used(wallfacer, llama: str) -> None:
    """Layers with other heads than the model's are not there to be counted."""
    args = ("plan", "--model", llama, "--memory-gib", "80", *ON_FOUR)
    title = "Activations of a rank's 8,192 tokens, "
    assert f"{title}counted in the model's layers: GiB" in wallfacer(*args)[1]
    out = " ".join(wallfacer(*args, "--heads", "32")[1].split())
    assert f"{title}by formulas for Llama's layers (options change its heads): GiB" in out


def test_the_title_says_why_layers_could_not_be_counted(
    wallfacer, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("forward() got an unexpected keyword argument\n")

    monkeypatch.setattr(layers, "_count_layers", fail)
    out = wallfacer("plan", "--model", llama, "--memory-gib", "80", *ON_FOUR)[1]
    reason = "TypeError: forward() got an unexpected keyword argument)"
    assert f"by formulas for Llama's layers ({reason}" in " ".join(out.split())


def test_the_budget_as_json_is_in_bytes(wallfacer_json, llama: str) -> None:
    """On 8 ranks each stage of ZeRO makes room for longer sequences: more than ZeRO 3's buckets."""
    args = ("plan", "--model", llama, "--memory-gib", "80", "--ranks", "8", "--seqlen", "65536")
    budget = wallfacer_json(*args)["budget"]
    adam = 12 * budget["model"]["parameters"]  # float32 weights and two moments
    assert [stage["optimizer"] for stage in budget["states"]] == [adam, *[adam / 8] * 3]
    names = [(choice["checkpoints"], bool(choice["tile"])) for choice in budget["choices"]]
    places = ("none", "device", "host")
    assert names == [(place, tiled) for place in places for tiled in (False, True)]
    for choice in budget["choices"]:
        assert choice["longest"] == sorted(choice["longest"])
        for longest, device_bytes in zip(choice["longest"], choice["device_bytes"], strict=True):
            assert (longest >= 65536) == (device_bytes <= 80 * 2**30)
    replicas = wallfacer_json(*args, "--data-parallel-size", "4")["budget"]
    assert replicas["ranks"] == 32
    assert replicas["states"][3]["optimizer"] == adam / 32


def test_a_budget_needs_a_model_and_a_memory_size(wallfacer_json, llama: str) -> None:
    for args in (("--model", llama), ("--memory-gib", "80")):
        assert "budget" not in wallfacer_json("plan", *args, *ON_FOUR)


def test_a_budget_counts_experts_and_refuses_a_bad_count(
    wallfacer, wallfacer_json, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(hidden_size=64, intermediate_size=32, **heads)
    config.save_pretrained(tmp_path)
    args = ("plan", "--model", str(tmp_path), *ON_FOUR, "--memory-gib", "80")
    assert wallfacer_json(*args)["budget"]["model"]["experts"]["count"] == 8
    file = tmp_path / "config.json"
    count = '"num_experts_per_tok": '
    assert f"{count}2" in file.read_text()
    file.write_text(file.read_text().replace(f"{count}2", f'{count}"x"'))
    code, _, err = wallfacer(*args)
    # newer versions of transformers refuse the value themselves
    assert code == 2 and ("leave --memory-gib out" in err or "num_experts_per_tok" in err)


def test_a_budget_of_a_model_of_images_is_refused(wallfacer, tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    code, _, err = wallfacer("plan", "--model", str(tmp_path), *ON_FOUR, "--memory-gib", "80")
    assert code == 2 and "ViTConfig is of no language model; leave --memory-gib out" in err


def test_a_data_parallel_size_below_one_is_refused(wallfacer) -> None:
    code, _, err = wallfacer("plan", "--data-parallel-size", "0", *ON_FOUR)
    assert code == 2 and "--data-parallel-size must be at least 1, got 0" in err
