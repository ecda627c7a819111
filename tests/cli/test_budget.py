"""`wallfacer plan --model FOLDER --memory-gib 80`: a rank's whole memory below the plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

ON_EIGHT = ("--ranks", "8", "--seqlen", "65536")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the config of a Llama of about a billion parameters."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    transformers.LlamaConfig(hidden_size=2048, num_hidden_layers=16, **heads).save_pretrained(
        tmp_path
    )
    return str(tmp_path)


def test_tables_have_eighty_columns(wallfacer, llama: str) -> None:
    code, out, err = wallfacer("plan", "--model", llama, "--memory-gib", "80", *ON_EIGHT)
    assert code == 0, err
    budget = out[out.index("A rank's memory in training") :]
    assert max(len(line) for line in budget.splitlines() if line[0] in "┏┃┡│└") <= 80
    for words in ("optimizer states", "Activations of a rank's 8,192 tokens", "fits 80.0 GiB"):
        assert words in budget
    assert "ring" in budget.split("by forward route")[1]


def test_json_has_the_same_in_bytes(wallfacer, llama: str) -> None:
    args = ("plan", "--model", llama, "--memory-gib", "80", *ON_EIGHT, "--json")
    budget = json.loads(wallfacer(*args)[1])["budget"]
    count, ranks = budget["model"]["parameters"], 8
    assert [one["optimizer"] for one in budget["states"]] == [12 * count, *[12 * count / ranks] * 3]
    names = [(one["checkpoints"], bool(one["tile"])) for one in budget["choices"]]
    assert names == [(w, t) for w in ("none", "device", "host") for t in (False, True)]
    for one in budget["choices"]:
        assert one["longest"] == sorted(one["longest"])
        assert all(
            (n >= 65536) == (b <= 80 * 2**30)
            for n, b in zip(one["longest"], one["device_bytes"], strict=True)
        )
    replicas = json.loads(wallfacer(*args, "--data-parallel-size", "4")[1])["budget"]
    assert replicas["ranks"] == 32
    assert replicas["states"][3]["optimizer"] == 12 * count / 32


def test_without_a_model_or_a_memory_there_is_no_budget(wallfacer, llama: str) -> None:
    for args in (("--model", llama), ("--memory-gib", "80")):
        code, out, _ = wallfacer("plan", *args, *ON_EIGHT, "--json")
        assert code == 0 and "budget" not in json.loads(out)


def test_what_cannot_be_counted_is_refused(wallfacer, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(hidden_size=64, intermediate_size=32, **heads)
    config.save_pretrained(tmp_path)
    args = ("plan", "--model", str(tmp_path), *ON_EIGHT)
    code, out, _ = wallfacer(*args, "--memory-gib", "80", "--json")
    assert code == 0 and json.loads(out)["budget"]["model"]["experts"]["count"] == 8
    file = tmp_path / "config.json"
    file.write_text(
        file.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": "x"')
    )
    code, _, err = wallfacer(*args, "--memory-gib", "80")
    assert code == 2 and ("leave --memory-gib out" in err or "num_experts_per_tok" in err)
    code, _, err = wallfacer("plan", "--data-parallel-size", "0", *ON_EIGHT)
    assert code == 2 and "--data-parallel-size must be at least 1, got 0" in err
