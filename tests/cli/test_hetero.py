"""`wallfacer bench-hetero` measures the rates of this machine; `wallfacer generate` uses them."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from wf_backends.cli import bench_hetero as module
from wf_backends.cli import readers
from wf_backends.cli.generate import accelerator_rates

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

RATES = {"link": 2e10, "host": 6e10, "accelerator": 1e12, "memory": 1e11, "staging": None}


@pytest.fixture
def hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is named "lab"."""
    monkeypatch.setattr(module.socket, "gethostname", lambda: "lab")


@pytest.fixture
def cache(tmp_path: Path, hostname: None) -> Path:
    """A folder with rates of this host."""
    content = {"device": "cuda:0", "rates": RATES}
    (tmp_path / "hetero-lab-bfloat16.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes whose rates were measured; a measurement gives constants."""
    import wf_backends.hetegen as hetegen

    dtypes: list[torch.dtype] = []

    def measure(dtype: torch.dtype, pin_weights: bool) -> tuple[str, hetegen.Rates]:
        dtypes.append(dtype)
        return "cuda:0", hetegen.Rates(2e10 if pin_weights else 1e10, 3e10, 1e12)

    monkeypatch.setattr(hetegen, "measure_machine", measure)
    return dtypes


def test_bench_hetero_predicts_tokens_per_second(wallfacer, cache: Path) -> None:
    """20 GB at 20 GB/s of the link and 60 GB/s of the host: alone, 1 and 3 tokens a second."""
    code, out, _ = wallfacer("bench-hetero", "--model-size", "20GB", "--cache-dir", str(cache))
    assert code == 0 and "alpha 0.75" in out
    predicted = re.findall(r"(HeteGen|streaming|the CPU alone) +([\d.]+) tokens/s", out)
    assert predicted == [("HeteGen", "4.00"), ("streaming", "1.00"), ("the CPU alone", "3.00")]


def test_bench_hetero_counts_the_fixed_time_of_the_hosts_calls(wallfacer, cache: Path) -> None:
    """1 ms for each of 149 weights of 134 MB, beside a third of a second of computing."""
    content = {"device": "cuda:0", "rates": RATES | {"host_call_seconds": 1e-3}}
    (cache / "hetero-lab-bfloat16.json").write_text(json.dumps(content))
    out = wallfacer("bench-hetero", "--model-size", "20GB", "--cache-dir", str(cache))[1]
    alone = re.search(r"the CPU alone +([\d.]+) tokens/s", out)
    assert alone and float(alone[1]) == pytest.approx(1 / (1 / 3 + 0.149), rel=0.01)


@pytest.mark.parametrize("given", [None, "AVX2"])
def test_bench_hetero_computes_without_amx_unless_told_otherwise(
    wallfacer, cache: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", given or "")
    if given is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert wallfacer("bench-hetero", "--cache-dir", str(cache))[0] == 0
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == (given or "AVX512_CORE_BF16")


def test_bench_hetero_measures_once_per_dtype(wallfacer, tmp_path: Path, measured) -> None:
    args = ("bench-hetero", "--cache-dir", str(tmp_path / "kept"))
    (code, first, _), (second_code, second, _) = wallfacer(*args), wallfacer(*args)
    assert code == second_code == 0 and len(measured) == 1
    assert "measured" in first and "from " in second
    assert first.splitlines()[1:] == second.splitlines()[1:]
    wallfacer(*args, "--fresh")
    assert measured == [torch.bfloat16] * 2
    wallfacer(*args, "--dtype", "float32")
    assert measured[2:] == [torch.float32]


def test_bench_hetero_keeps_other_rates_for_pinned_weights(
    wallfacer, tmp_path: Path, measured
) -> None:
    args = ("bench-hetero", "--cache-dir", str(tmp_path / "kept"))
    for _ in range(2):
        assert re.search(r"pinned host memory .* 10.00 GB/s", wallfacer(*args)[1])
        assert re.search(r"pinned host .* 20.00 GB/s", wallfacer(*args, "--pin-weights")[1])
    assert len(measured) == 2


def test_generate_takes_the_kept_rates_of_this_device(
    tmp_path: Path, monkeypatch, hostname: None, measured
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    from wf_backends.hetegen import Rates

    model = torch.nn.Linear(2, 2, dtype=torch.float16)
    for _ in range(2):
        assert accelerator_rates(model, tmp_path, pin_weights=False) == Rates(1e10, 3e10, 1e12)
    assert measured == [torch.float16]
    file = tmp_path / "hetero-lab-float16.json"
    file.write_text(file.read_text().replace("cuda:0", "threads"))  # measured without the GPU
    assert accelerator_rates(model, tmp_path, pin_weights=False).host == 3e10 and len(measured) == 2


def write_20_characters(path: Path, text: str) -> None:
    """As `Path.write_text` on a disk that is full after 20 characters."""
    with path.open("w") as file:
        file.write(text[:20])
    raise OSError("no space left")


def test_a_full_disk_leaves_the_kept_rates_as_they_are(
    wallfacer, cache: Path, monkeypatch, measured
) -> None:
    kept = cache / "hetero-lab-bfloat16.json"
    kept.write_text(kept.read_text().replace("link", "of another version"))
    before = kept.read_text()
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_20_characters)
        code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(cache))
    assert code == 0 and "not kept (no space left)" in out and "tokens/s" in out
    assert kept.read_text() == before


def test_a_file_in_place_of_the_cache_folder_is_reported(
    wallfacer, tmp_path: Path, measured
) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(tmp_path / "file"))
    assert code == 0 and "not kept (" in out


def test_brackets_of_a_folder_are_not_read_as_markup(
    wallfacer, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a[" / "b]"
    folder.mkdir(parents=True)
    (folder / "hetero-lab-bfloat16.json").write_text(
        (cache / "hetero-lab-bfloat16.json").read_text()
    )
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(folder))
    assert code == 0 and f"from {folder}/hetero-lab-bfloat16.json" in out
    (folder / "config.json").write_text('{"model_type": "llama"}')
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3")
    assert f"loading {folder}" in wallfacer(*args, "--model", str(folder))[2]


@pytest.mark.parametrize("size", ["many", "0B", "26"])
def test_bench_hetero_refuses_a_bad_size(wallfacer, cache: Path, size: str) -> None:
    code, _, err = wallfacer("bench-hetero", "--model-size", size, "--cache-dir", str(cache))
    assert code == 2 and repr(size) in err
    assert ('with its unit, such as "20GB"' in err) == (size != "0B")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> Path:
    """A Llama with a tokenizer of the words w0 to w95, and the entry point that reads it."""
    from tests.hetegen.models import make_model

    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    fast.save_pretrained(tmp_path)
    make_model("llama").save_pretrained(tmp_path)

    class Entry:
        @staticmethod
        def load():  # type: ignore[no-untyped-def]
            from wf_transformers.folders.load import generator

            return generator

    monkeypatch.setattr(readers, "entry_points", lambda group: [Entry])
    capfd.readouterr()  # drops the log of imports
    return tmp_path


def test_generate_prints_tokens_and_its_prediction(wallfacer, folder: Path) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3 w4", "--max-new-tokens", "5")
    args += ("--max-memory", "80kB", "--shaped", "0.1,0.2,10")
    code, out, err = wallfacer(*args)
    assert code == 0, err
    assert len(out.split()) == 5 and "5 tokens, " in err and "predicted: " in err
    code, sampled, _ = wallfacer(*args, "--sample")
    assert code == 0 and sampled != out


GENERATE = ("generate", "--max-memory", "80kB", "--shaped", "0.1,0.2,10", "--max-new-tokens", "5")


def test_generate_reads_its_prompt_from_a_file_or_from_stdin(
    wallfacer, folder: Path, monkeypatch
) -> None:
    """Without the end of the last line, which `echo` adds."""
    file = folder / "prompt.txt"
    file.write_text("w3 w4\n")
    args = (*GENERATE, "--model", str(folder))
    expected = wallfacer(*args, "--prompt", "w3 w4")[1]
    assert wallfacer(*args, "--prompt-file", str(file))[1] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w3 w4\n")))
    assert wallfacer(*args, "--prompt-file", "-")[1] == expected


def test_generate_refuses_a_prompt_file_that_is_no_text(wallfacer, folder: Path) -> None:
    args = (*GENERATE, "--model", str(folder), "--prompt-file", str(folder / "model.safetensors"))
    code, _, err = wallfacer(*args)
    assert code == 2 and "--prompt-file must be text: 'utf-8' codec" in err


@pytest.mark.parametrize("nearly_greedy", [("--temperature", "0.01"), ("--top-p", "0.001")])
def test_generate_samples_by_temperature_and_top_p(
    wallfacer, folder: Path, nearly_greedy: tuple[str, str]
) -> None:
    args = (*GENERATE, "--model", str(folder), "--prompt", "w3 w4")
    greedy, sampled = wallfacer(*args)[1], wallfacer(*args, "--sample")[1]
    assert wallfacer(*args, "--sample", *nearly_greedy)[1] == greedy != sampled


def test_generate_asks_by_the_chat_template(wallfacer, folder: Path) -> None:
    args = (*GENERATE, "--model", str(folder), "--prompt")
    code, _, err = wallfacer(*args, "w4", "--chat")
    assert code == 2 and "its tokenizer has no chat template: leave --chat out" in err
    template = "{% for m in messages %}w3 {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert wallfacer(*args, "w4", "--chat")[1] == wallfacer(*args, "w3 w4")[1]


def test_generate_refuses_bad_rates_an_empty_prompt_and_a_missing_folder(
    wallfacer, folder: Path, tmp_path: Path
) -> None:
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--model")
    code, _, err = wallfacer(*args, str(folder), "--shaped", "1,2")
    assert code == 2 and "--shaped must be three rates" in err
    code, _, err = wallfacer(*args, str(folder), "--shaped", "1,2,3", "--prompt", " ")
    assert code == 2 and "the prompt must have a token at least, got ' '" in err
    code, _, err = wallfacer(*args, str(tmp_path / "nowhere"))
    assert code == 2 and "there is no such folder" in err


def test_generate_prints_a_character_at_the_end_that_lacks_bytes(wallfacer, folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(re.sub(r'"(w[1-9]\d*)":', r'"\1\\ufffd":', tokenizer.read_text()))
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    _, out, err = wallfacer(*args, "--shaped", "0.1,0.2,10", "--max-new-tokens", "5")
    assert out.count("\ufffd") == 5 and "5 tokens, " in err


def test_generate_streams_one_text_whatever_the_folders_generation_config_says(
    wallfacer, folder: Path
) -> None:
    (folder / "generation_config.json").write_text('{"num_beams": 3, "num_return_sequences": 2}')
    args = ("generate", "--model", str(folder), "--prompt", "w3 w4", "--max-memory", "80kB")
    code, out, err = wallfacer(*args, "--shaped", "0.1,0.2,10", "--max-new-tokens", "5")
    assert code == 0, err
    assert len(out.split()) == 5


def test_generate_refuses_a_token_that_the_model_does_not_have(wallfacer, folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w95": 95', '"w95": 96'))
    args = ("generate", "--model", str(folder), "--prompt", "w95", "--max-memory", "80kB")
    code, _, err = wallfacer(*args, "--shaped", "0.1,0.2,10")
    assert code == 2 and "has the token 96, and the model has 96 tokens" in err


def test_generate_refuses_more_tokens_than_learned_positions(wallfacer, folder: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 6}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    args = (*GENERATE, "--model", str(folder), "--max-memory", "20kB", "--prompt")
    assert wallfacer(*args, "w3 w4")[0] == 0
    code, _, err = wallfacer(*args, "w3 w4 w5")
    message = "a prompt of 3 tokens and --max-new-tokens 5: GPT2LMHeadModel has 6 positions"
    assert code == 2 and message in err


def test_generate_refuses_a_broken_tokenizer(wallfacer, folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3", "--model")
    code, _, err = wallfacer(*args, str(folder))
    assert code == 2 and f"wallfacer: --model {folder}: " in err


def test_one_token_is_counted_in_the_singular(wallfacer, folder: Path) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    *_, last = wallfacer(*args, "--shaped", "0.1,0.2,10", "--max-new-tokens", "1")[2].splitlines()
    assert last == "1 token"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--seed", str(2**64)), f"--seed must be at most {2**64 - 1}, got {2**64}"),
        (("--seed", str(-(2**63) - 1)), f"--seed must be at least .*, got -{2**63 + 1}"),
        (("--seed", "7"), "--seed 7 has an effect only with --sample"),
        (("--top-p", "0.5"), "--top-p 0.5 has an effect only with --sample"),
        (("--sample", "--temperature", "0"), "--temperature must be at least 0.01, got 0"),
        (("--sample", "--temperature", "nan"), "--temperature must be at least 0.01, got nan"),
        (("--sample", "--top-p", "1.5"), "--top-p must be at most 1, got 1.5"),
        (("--prompt", ""), "the prompt must come from --prompt or from --prompt-file: give one"),
        (("--prompt-file", "-"), "must come from --prompt or from --prompt-file: give one"),
        (("--prompt-file", "nowhere.txt"), "'nowhere.txt': No such file"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be a positive integer, got 0"),
        (("--max-new-tokens", str(2**41)), f"--max-new-tokens must be at most {2**40}, got"),
        (("--max-memory", "lots"), "--max-memory must be .* got 'lots'"),
        (("--cpu-memory", "much"), "--cpu-memory must be .* got 'much'"),
        (("--shaped", "1,2,nan"), "--shaped must be three rates as 1,3,20, got '1,2,nan'"),
    ],
)
def test_generate_refuses_bad_values_before_it_loads_the_model(
    wallfacer, folder: Path, option: tuple[str, str], message: str
) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    code, _, err = wallfacer(*args, "--shaped", "1,2,3", *option)
    assert code == 2 and re.search(message, " ".join(err.split())) and "loading" not in err


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_every_seed_of_torch_is_accepted(wallfacer, folder: Path, seed: int) -> None:
    args = ("generate", "--model", str(folder), "--prompt", "w3", "--max-memory", "80kB")
    args += ("--shaped", "0.1,0.2,10", "--sample", "--seed", str(seed), "--max-new-tokens", "1")
    assert wallfacer(*args)[0] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"hidden_size": 32}', 'config.json must name the model, as "model_type": "llama"'),
        ("[1]", 'config.json must name the model, as "model_type": "llama"'),
        ('{"model_type"', "config.json is no JSON (Expecting ':' delimiter"),
        ("", "config.json is no JSON (Expecting value"),
    ],
)
def test_generate_refuses_a_folder_without_a_model_type(
    wallfacer, tmp_path: Path, config: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3", "--model")
    code, _, err = wallfacer(*args, str(tmp_path))
    assert code == 2 and f"--model {tmp_path}: {message}" in " ".join(err.split())
    code, _, err = wallfacer(*args, str(tmp_path / "config.json"))
    assert code == 2 and "there is no such folder" in err
