"""`wallfacer generate`: tokens and the prediction of a small Llama on threads; refusals."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from wf_backends.cli import readers

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")


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
