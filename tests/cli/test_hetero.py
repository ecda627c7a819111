"""`wallfacer generate` and `wallfacer bench-hetero`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from wf_backends.cli import bench_hetero as module
from wf_backends.cli import readers
from wf_backends.cli.generate import accelerator_rates

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

RATES = {"link": 2e10, "host": 6e10, "accelerator": 1e12, "memory": 1e11, "staging": None}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rates of this host."""
    monkeypatch.setattr(module.socket, "gethostname", lambda: "here")
    words = {"device": "cuda:0", "rates": RATES}
    (tmp_path / "hetero-here-bfloat16.json").write_text(json.dumps(words))
    return tmp_path


def test_bench_hetero_prints_the_law(wallfacer, known: Path) -> None:
    code, out, _ = wallfacer("bench-hetero", "--model-size", "20GB", "--cache-dir", str(known))
    assert code == 0 and "alpha 0.75" in out
    found = re.findall(r"(HeteGen|streaming|the CPU alone) +([\d.]+) tokens/s", out)
    assert found == [("HeteGen", "4.00"), ("streaming", "1.00"), ("the CPU alone", "3.00")]


def test_bench_hetero_measures_once(wallfacer, tmp_path: Path, monkeypatch) -> None:
    import wf_backends.hetegen as hetegen

    calls: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> tuple[str, hetegen.Rates]:
        calls.append(dtype)
        return "threads", hetegen.Rates(1e10, 1e10, 1e12)

    monkeypatch.setattr(hetegen, "measure_machine", measure)
    args = ("bench-hetero", "--cache-dir", str(tmp_path / "kept"))
    first, second = wallfacer(*args), wallfacer(*args)
    assert first[0] == second[0] == 0 and len(calls) == 1
    assert "measured" in first[1] and "from " in second[1]
    assert first[1].splitlines()[1:] == second[1].splitlines()[1:]
    wallfacer(*args, "--fresh")
    assert calls == [torch.bfloat16] * 2
    wallfacer(*args, "--dtype", "float32")  # has rates of its own
    assert calls[2:] == [torch.float32]


def test_generate_takes_the_rates_that_are_known(tmp_path: Path, monkeypatch) -> None:
    import wf_backends.hetegen as hetegen

    calls: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> tuple[str, hetegen.Rates]:
        calls.append(dtype)
        return "cuda:0", hetegen.Rates(1e10, 3e10, 1e12)

    monkeypatch.setattr(hetegen, "measure_machine", measure)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = torch.nn.Linear(2, 2, dtype=torch.float16)
    for _ in range(2):
        assert accelerator_rates(model, tmp_path) == hetegen.Rates(1e10, 3e10, 1e12)
    assert calls == [torch.float16]
    file = tmp_path / "hetero-here-float16.json"
    file.write_text(file.read_text().replace("cuda:0", "threads"))  # of before the GPU came
    assert accelerator_rates(model, tmp_path).host == 3e10 and len(calls) == 2


def cut_off(self: Path, text: str) -> None:
    with self.open("w") as file:
        file.write(text[:20])
    raise OSError("no space left")


def test_rates_are_kept_whole_or_not_at_all(wallfacer, known: Path, monkeypatch) -> None:
    """Another run may read them at any moment, and a disk may be full."""
    import wf_backends.hetegen as hetegen

    kept = known / "hetero-here-bfloat16.json"
    kept.write_text(kept.read_text().replace("link", "of another version"))
    before = kept.read_text()
    monkeypatch.setattr(hetegen, "measure_machine", lambda _: ("threads", hetegen.Rates(1, 1, 1)))
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", cut_off)
        code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(known))
    assert code == 0 and "not kept (no space left)" in out and "tokens/s" in out
    assert kept.read_text() == before
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(kept))
    assert code == 0 and "not kept (" in out  # a file where the folder should be


def test_a_folder_s_name_is_no_markup(wallfacer, known: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "a[" / "b]").mkdir(parents=True)
    (folder / "hetero-here-bfloat16.json").write_text(
        (known / "hetero-here-bfloat16.json").read_text()
    )
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(folder))
    assert code == 0 and f"from {folder}/hetero-here-bfloat16.json" in out
    (folder / "config.json").write_text('{"model_type": "llama"}')
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3")
    assert f"loading {folder}" in wallfacer(*args, "--model", str(folder))[2]


@pytest.mark.parametrize("size", ["many", "0B"])
def test_bench_hetero_refuses_a_bad_size(wallfacer, known: Path, size: str) -> None:
    code, _, err = wallfacer("bench-hetero", "--model-size", size, "--cache-dir", str(known))
    assert code == 2 and repr(size) in err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> Path:
    """A model with a tokenizer of whole words, and the entry point that reads it."""
    from tests.hetegen.models import make_model

    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    fast.save_pretrained(tmp_path)
    make_model("llama").save_pretrained(tmp_path)

    class Entry:
        @staticmethod
        def load():  # type: ignore[no-untyped-def]
            from wf_transformers.folder import generator

            return generator

    monkeypatch.setattr(readers, "entry_points", lambda group: [Entry])
    capfd.readouterr()  # what libraries log when they are imported
    return tmp_path


def test_generate(wallfacer, folder: Path) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3 w4", "--max-new-tokens", "5")
    code, out, err = wallfacer(*args, "--max-memory", "80kB", "--shaped", "0.1,0.2,10")
    assert code == 0, err
    assert len(out.split()) == 5 and "5 tokens, " in err and "predicted: " in err
    drawn = wallfacer(*args, "--max-memory", "80kB", "--shaped", "0.1,0.2,10", "--sample")
    assert drawn[0] == 0 and drawn[1] != out


def test_generate_refuses(wallfacer, folder: Path, tmp_path: Path) -> None:
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--model")
    code, _, err = wallfacer(*args, str(folder), "--shaped", "1,2")
    assert code == 2 and "--shaped must be three rates" in err
    code, _, err = wallfacer(*args, str(folder), "--shaped", "1,2,3", "--prompt", " ")
    assert code == 2 and "the prompt must have a token at least, got ' '" in err
    code, _, err = wallfacer(*args, str(tmp_path / "nowhere"))
    assert code == 2 and "there is no such folder" in err


def test_generate_needs_a_tokenizer(wallfacer, folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3", "--model")
    code, _, err = wallfacer(*args, str(folder))
    assert code == 2 and f"wallfacer: --model {folder}: " in err


def test_one_token_is_one_token(wallfacer, folder: Path) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    *_, last = wallfacer(*args, "--shaped", "0.1,0.2,10", "--max-new-tokens", "1")[2].splitlines()
    assert last == "1 token"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seed", str(2**64)), f"--seed must be from -{2**63} to {2**64 - 1}, got {2**64}"),
        (("--seed", str(-(2**63) - 1)), f"--seed must be from .*, got -{2**63 + 1}"),
        (("--seed", "7"), "--seed 7 is of a draw: give --sample too, or leave it out"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be a positive integer, got 0"),
        (("--max-new-tokens", str(2**41)), f"--max-new-tokens must be at most {2**40}, got"),
        (("--max-memory", "lots"), "--max-memory must be .* got 'lots'"),
        (("--cpu-memory", "much"), "--cpu-memory must be .* got 'much'"),
        (("--shaped", "1,2,nan"), "--shaped must be three rates as 1,3,20, got '1,2,nan'"),
    ],
)
def test_generate_refuses_bad_values_before_it_loads_the_model(
    wallfacer, folder: Path, words: tuple[str, str], told: str
) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    code, _, err = wallfacer(*args, "--shaped", "1,2,3", *words)
    assert code == 2 and re.search(told, " ".join(err.split())) and "loading" not in err


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_any_seed_that_torch_takes_is_taken(wallfacer, folder: Path, seed: int) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    drawn = ("--sample", "--seed", str(seed), "--max-new-tokens", "1")
    assert wallfacer(*args, "--shaped", "0.1,0.2,10", *drawn)[0] == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"hidden_size": 32}', 'config.json must tell what it is of, as "model_type": "llama"'),
        ("[1]", 'config.json must tell what it is of, as "model_type": "llama"'),
        ('{"model_type"', "config.json is no JSON (Expecting ':' delimiter"),
        ("", "config.json is no JSON (Expecting value"),
    ],
)
def test_a_folder_whose_config_tells_no_model(
    wallfacer, tmp_path: Path, config: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3", "--model")
    code, _, err = wallfacer(*args, str(tmp_path))
    assert code == 2 and f"--model {tmp_path}: {told}" in " ".join(err.split())
    code, _, err = wallfacer(*args, str(tmp_path / "config.json"))
    assert code == 2 and "there is no such folder" in err
