"""`--model`: the heads and head_dim of a Hugging Face model in place of the defaults."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

ON_FOUR = ("--ranks", "4", "--seqlen", "32768")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the config of a model with 16 heads of 96 elements and 4 key heads."""
    config = transformers.LlamaConfig(
        hidden_size=1536, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=2
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_plan_takes_the_shape_of_a_model(wallfacer_json, llama: str) -> None:
    shape = ("--heads", "16", "--kv-heads", "4", "--head-dim", "96")
    expected = wallfacer_json("plan", *shape, *ON_FOUR)
    assert expected != wallfacer_json("plan", *ON_FOUR)
    assert expected == wallfacer_json("plan", "--model", llama, *ON_FOUR)
    assert expected == wallfacer_json("plan", *ON_FOUR, "--model", f"{llama}/config.json")


def test_an_option_overrides_the_model(wallfacer_json, llama: str) -> None:
    kv_heads = ("--kv-heads", "16")
    expected = wallfacer_json("plan", "--heads", "16", "--head-dim", "96", *kv_heads, *ON_FOUR)
    assert expected == wallfacer_json("plan", *kv_heads, "--model", llama, *ON_FOUR)


def test_explain_takes_the_shape_of_a_model(wallfacer, llama: str) -> None:
    shape = ("--heads", "16", "--kv-heads", "4", "--head-dim", "96")
    code, expected, _ = wallfacer("explain", "ring", *shape)
    assert (code, expected) == wallfacer("explain", "ring", "--model", llama)[:2]
    assert code == 0


def test_bench_takes_the_shape_of_a_model(wallfacer_json, llama: str, tmp_path: Path) -> None:
    args = ("--seqlen", "128", "--repeats", "1", "--cache-dir", str(tmp_path / "kept"))
    assert len(wallfacer_json("bench", "--model", llama, *args)["plans"]) == 1


def test_a_config_without_key_heads_has_as_many_as_heads(wallfacer_json, tmp_path: Path) -> None:
    transformers.GPT2Config(n_embd=768, n_head=12).save_pretrained(tmp_path)
    shape = ("--heads", "12", "--kv-heads", "12", "--head-dim", "64")
    expected = wallfacer_json("plan", *shape, *ON_FOUR)
    assert expected == wallfacer_json("plan", "--model", str(tmp_path), *ON_FOUR)


def test_a_model_with_latents_has_a_head_dim_of_its_values(
    wallfacer, wallfacer_json, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    dims = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
    transformers.DeepseekV3Config(**heads, **dims).save_pretrained(tmp_path)
    shape = ("--heads", "8", "--kv-heads", "8", "--head-dim", "48")
    expected = wallfacer_json("plan", *shape, "--value-dim", "24", *ON_FOUR)
    assert expected == wallfacer_json("plan", "--model", str(tmp_path), *ON_FOUR)
    assert expected != wallfacer_json("plan", *shape, *ON_FOUR)
    args = ("--seqlen", "128", "--repeats", "1", "--cache-dir", str(tmp_path / "kept"), "--json")
    assert wallfacer("bench", "--model", str(tmp_path), *args)[0] == 0
    assert "--value-dim must be at least 0" in wallfacer("plan", "--value-dim", "-1")[2]


def test_models_that_cannot_be_read_are_refused(wallfacer, tmp_path: Path) -> None:
    code, _, err = wallfacer("plan", "--model", str(tmp_path / "nowhere"))
    assert code == 2 and f"--model {tmp_path}/nowhere: there is no such folder, and as a na" in err
    transformers.MambaConfig().save_pretrained(tmp_path)
    code, _, err = wallfacer("plan", "--model", str(tmp_path))
    assert code == 2 and "MambaConfig has no num_attention_heads; give --heads" in err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", 'config.json must name the model, as "model_type": "llama"'),
        ("[" * 100_000, "config.json is no JSON (maximum recursion depth"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": []}', "TypeError: "),
        ('{"model_type": "llama", "index_topk": 6}', '"index_topk" in its config: an indexer'),
    ],
)
def test_a_bad_config_is_refused_in_one_line(
    wallfacer, tmp_path: Path, config: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    code, out, err = wallfacer("plan", "--model", str(tmp_path))
    assert (code, out) == (2, "") and f"--model {tmp_path}: " in err and message in err


OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "eight"}, '"num_attention_heads" in config.json must be a number'),
        ({"num_key_value_heads": "two"}, "must be a number, got 'two'"),
        ({"text_config": {"model_type": "llama", "rms_norm_eps": "x"}}, '"rms_norm_eps" in config'),
        (OWN_CODE, 'it has code of its own ("auto_map"), which only a script of yours may run'),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "plan",
        "chunk --seqlen 8",
        "verify --sequence-parallel-size 2",
        "generate --prompt w --max-memory 80kB --shaped 1,2,3",
    ],
)
def test_a_word_in_place_of_a_number_and_code_beside_a_config_are_refused_by_name(
    wallfacer, tmp_path: Path, command: str, changes: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | changes))
    (tmp_path / "own.py").write_text("raise ZeroDivisionError")
    code, out, err = wallfacer(*command.split(), "--model", str(tmp_path))
    assert (code, out) == (2, "") and message in err
    assert err.count(f"--model {tmp_path}: ") == 1


def test_a_file_that_is_no_config_is_refused_whatever_its_path_says(
    wallfacer, tmp_path: Path
) -> None:
    path = tmp_path / "llama-tokenizer.json"  # transformers takes it for a Llama of default sizes
    path.write_text('{"version": "1.0"}')
    code, _, err = wallfacer("plan", "--model", str(path))
    assert code == 2 and f"--model {path}: llama-tokenizer.json must name the model" in err


@pytest.mark.parametrize("answers", [False, True])
def test_a_name_is_looked_up_in_the_cache_alone_if_the_hub_does_not_answer(
    wallfacer, monkeypatch, answers: bool
) -> None:
    from wf_transformers.folders import shape

    asked = list[bool]()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if answers:
            return socket.socket()
        raise TimeoutError

    def from_pretrained(name: str, local_files_only: bool, trust_remote_code: bool) -> None:
        asked.append(local_files_only)
        raise OSError(f"no {name} here")

    monkeypatch.setattr(shape, "getproxies", dict)
    monkeypatch.setattr(shape.socket, "create_connection", connect)
    monkeypatch.setattr(shape.AutoConfig, "from_pretrained", from_pretrained)
    code, _, err = wallfacer("plan", "--model", "somebody/model")
    message = "there is no such folder, and as a name on the Hub: no somebody/model here"
    assert code == 2 and f"--model somebody/model: {message}" in err
    assert asked == [not answers]


def test_without_transformers_the_error_names_the_extra_to_install(wallfacer, monkeypatch) -> None:
    for name in list(sys.modules):
        if name.startswith("wf_transformers"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = wallfacer("plan", "--model", "somebody/model")
    assert code == 2 and "pip install '.[transformers]'" in err
