"""`wallfacer chunk`: the memory of a model's activations, from its configuration alone."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

from wf_backends.cli import chunk as command  # noqa: E402
from wf_backends.cli import readers  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of a few layers with 70 billion parameters' width, and no weights."""
    value = "wf_transformers.skeleton:skeleton"
    point = EntryPoint("transformers", value, command.SKELETONS)
    monkeypatch.setattr(readers, "entry_points", lambda group: [point])
    transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=2,
        vocab_size=1000,
        torch_dtype="bfloat16",
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_large_model_under_a_budget(wallfacer, folder: str, tmp_path: Path) -> None:
    words = ("chunk", "--model", folder, "--seqlen", "16384", "--max-memory", "2GB")
    picture = tmp_path / "memory.png"
    code, out, err = wallfacer(*words, "--picture", str(picture))
    assert code == 0, err
    assert "3.6" in out.split("->")[0] and "model.layers.0.mlp and 1 alike" in out
    assert "model.layers.*.mlp.act_fn" in out
    assert picture.stat().st_size > 0

    words = ("chunk", "--model", folder, "--seqlen", "2048", "--max-memory", "250MB")
    code, out, err = wallfacer(*words, "--layers", "1", "--json", "--longest")
    plan = json.loads(out)
    assert plan["peak"] <= 250e6 < plan["peak_before"]
    assert plan["longest_sequence"] == 3072  # on every machine: by a GPU's rates


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seqlen", "0"), "--seqlen must be at least 1"),
        (("--seqlen", "8", "--max-memory", "much"), "max_memory must be a number of bytes"),
        (("--seqlen", "8", "--max-memory", "1.5"), "max_memory as a float is a share"),
        (("--seqlen", "8", "--attention", "flash"), "--attention must be one of"),
        (("--seqlen", "8", "--batch", str(2**40)), "--batch times --seqlen must be at most"),
        (("--seqlen", str(2**46)), f"--batch times --seqlen must be at most {2**29}, got {2**46}"),
        (("--seqlen", "8", "--picture", "a.bmp"), "--picture must end in one of ['.png', '.svg'"),
        (("--seqlen", "2048", "--layers", "1", "--max-memory", "1000000"), "no plan fits"),
        (("--seqlen", "8", "--longest"), "--longest needs --max-memory as a size"),
        (
            ("--seqlen", "2048", "--layers", "1", "--max-memory", "1MB"),
            "no plan fits. The closest one needs",
        ),
    ],
)
def test_bad_words(wallfacer, folder: str, words: tuple[str, ...], message: str) -> None:
    code, _, err = wallfacer("chunk", "--model", folder, *words)
    assert code == 2
    assert message in err


def test_the_closest_plan_is_none_that_needs_more_than_the_model(wallfacer, folder: str) -> None:
    """Slices of a small model may take more than they save."""
    path = Path(folder) / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16}
    sizes |= {"torch_dtype": "float32"}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    words = ("chunk", "--model", folder, "--seqlen", "4096", "--max-memory", "100kB")
    code, _, err = wallfacer(*words)
    closest, unchunked = map(int, re.findall(r"(?:needs|unchunked:) (\d+)", err))
    assert code == 2 and closest <= unchunked


@pytest.mark.parametrize("words", [("--max-memory", "1.5"), ("--max-slowdown", "-1")])
def test_a_budget_is_refused_before_the_model_is_read(
    wallfacer, folder, monkeypatch, words
) -> None:
    monkeypatch.setattr(command, "call_reader", lambda *_: pytest.fail("work has begun"))
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "8", *words)
    assert code == 2 and f"got {float(words[1])}" in err


def test_a_share_of_the_memory_is_drawn_as_a_budget(wallfacer, folder, monkeypatch) -> None:
    drawn = list[int]()
    monkeypatch.setattr(command, "draw_memory", lambda _, limit, *__: drawn.append(limit))
    words = ("--seqlen", "2048", "--layers", "1", "--max-memory", "0.9", "--picture", "a.png")
    code, out, err = wallfacer("chunk", "--model", folder, *words, "--json")
    assert code == 0, err
    assert drawn == [int(0.9 * json.loads(out)["peak_before"])]


def test_a_config_that_transformers_cannot_use(wallfacer, folder: str) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 0}))
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "8")
    assert code == 2 and f"wallfacer: --model {folder}: ZeroDivisionError: " in err


def test_a_folder_without_a_model(wallfacer, tmp_path: Path) -> None:
    code, _, err = wallfacer("chunk", "--model", str(tmp_path), "--seqlen", "8")
    assert code == 2
    assert "there is no config.json" in err
