"""`--model`: a Hugging Face model's heads in the place of the defaults."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

ON_EIGHT = ("--ranks", "8", "--seqlen", "65536", "--json")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the config of a model of 16 heads of 96 on 4 key heads."""
    config = transformers.LlamaConfig(
        hidden_size=1536, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=2
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_plan_takes_the_shape_of_a_model(wallfacer, llama: str) -> None:
    shape = ("--heads", "16", "--kv-heads", "4", "--head-dim", "96")
    said = wallfacer("plan", *shape, *ON_EIGHT)
    assert said != wallfacer("plan", *ON_EIGHT)
    assert said[:2] == wallfacer("plan", "--model", llama, *ON_EIGHT)[:2]
    assert said[:2] == wallfacer("plan", *ON_EIGHT, "--model", f"{llama}/config.json")[:2]


def test_what_is_said_counts_more_than_the_model(wallfacer, llama: str) -> None:
    whole = ("--kv-heads", "16")
    wanted = wallfacer("plan", "--heads", "16", "--head-dim", "96", *whole, *ON_EIGHT)
    assert wanted[:2] == wallfacer("plan", *whole, "--model", llama, *ON_EIGHT)[:2]


def test_explain_and_bench_take_it_too(wallfacer, llama: str, tmp_path: Path) -> None:
    said = wallfacer("explain", "ring", "--heads", "16", "--kv-heads", "4", "--head-dim", "96")
    assert said[:2] == wallfacer("explain", "ring", "--model", llama)[:2]
    args = ("--seqlen", "128", "--repeats", "1", "--cache-dir", str(tmp_path / "kept"), "--json")
    code, out, _ = wallfacer("bench", "--model", llama, *args)
    assert code == 0 and len(json.loads(out)["plans"]) == 1


def test_a_model_that_tells_no_key_heads_has_as_many_as_heads(wallfacer, tmp_path: Path) -> None:
    transformers.GPT2Config(n_embd=768, n_head=12).save_pretrained(tmp_path)
    shape = ("--heads", "12", "--kv-heads", "12", "--head-dim", "64")
    wanted = wallfacer("plan", *shape, *ON_EIGHT)
    assert wanted[:2] == wallfacer("plan", "--model", str(tmp_path), *ON_EIGHT)[:2]


def test_values_of_another_width_are_those_of_the_latents(wallfacer, tmp_path: Path) -> None:
    words = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 32}
    config = transformers.DeepseekV3Config(**words, qk_rope_head_dim=16, v_head_dim=24)
    config.save_pretrained(tmp_path)
    shape = ("--heads", "8", "--kv-heads", "8", "--head-dim", "48")
    wanted = wallfacer("plan", *shape, "--value-dim", "24", *ON_EIGHT)
    assert wanted[:2] == wallfacer("plan", "--model", str(tmp_path), *ON_EIGHT)[:2]
    assert wanted[:2] != wallfacer("plan", *shape, *ON_EIGHT)[:2]
    args = ("--seqlen", "128", "--repeats", "1", "--cache-dir", str(tmp_path / "kept"), "--json")
    assert wallfacer("bench", "--model", str(tmp_path), *args)[0] == 0
    assert "--value-dim must be at least 0" in wallfacer("plan", "--value-dim", "-1")[2]


def test_models_that_cannot_be_read_are_refused(wallfacer, tmp_path: Path) -> None:
    code, _, err = wallfacer("plan", "--model", str(tmp_path / "nowhere"))
    assert code == 2 and f"--model {tmp_path}/nowhere: " in err
    transformers.MambaConfig().save_pretrained(tmp_path)
    code, _, err = wallfacer("plan", "--model", str(tmp_path))
    assert code == 2 and "MambaConfig tells no num_attention_heads; say --heads" in err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("[]", 'config.json must tell what it is of, as "model_type": "llama"'),
        ("[" * 100_000, "config.json is no JSON (maximum recursion depth"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": []}', "TypeError: "),
    ],
)
def test_a_folder_whose_config_is_wrong_is_refused_in_a_line(
    wallfacer, tmp_path: Path, config: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    code, out, err = wallfacer("plan", "--model", str(tmp_path))
    assert (code, out) == (2, "") and f"--model {tmp_path}: {told}" in err


def test_without_transformers_it_says_what_to_install(wallfacer, monkeypatch) -> None:
    for name in [n for n in sys.modules if n.startswith("wf_transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = wallfacer("plan", "--model", "somebody/model")
    assert code == 2 and "pip install '.[transformers]'" in err
