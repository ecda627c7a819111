"""`wallfacer chunk`: AutoChunk's plan for a model, from its configuration without weights."""

from __future__ import annotations

import inspect
import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the transformers extra is missing")

import torch  # noqa: E402

from tests.autochunk.helpers import measured_peak, relative_error  # noqa: E402
from wf_backends.autochunk import BudgetError, ChunkPlan, autochunk  # noqa: E402
from wf_backends.cli import chunk as command  # noqa: E402
from wf_backends.cli import readers  # noqa: E402
from wf_transformers.folders.skeleton import keep_layers, layers_of_all_kinds, skeleton  # noqa: E402

LONGEST = 4096 if transformers.__version__ >= "5" else 3072
"""Of one layer in 250 MB; the same on every machine, by the rates of a GPU."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The config of a Llama as wide as that of 70 billion parameters, with two layers."""
    value = "wf_transformers.folders.skeleton:skeleton"
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
    picture = tmp_path / "memory.png"
    args = ("--seqlen", "16384", "--max-memory", "2GB", "--picture", str(picture))
    code, out, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 0, err
    assert "3.6" in out.split("->")[0] and "model.layers.0.mlp and 1 alike" in out
    assert "model.layers.*.mlp.act_fn" in out
    assert picture.stat().st_size > 0


def test_the_longest_sequence_within_a_budget(wallfacer_json, folder: str) -> None:
    args = ("--seqlen", "2048", "--layers", "1", "--max-memory", "250MB", "--longest")
    plan = wallfacer_json("chunk", "--model", folder, *args)
    assert plan["plan"]["peak"] <= 250e6 < plan["plan"]["peak_before"]
    assert plan["longest_sequence"] == LONGEST


RECURRENT_GEMMA = transformers.RecurrentGemmaConfig(
    num_attention_heads=4, num_hidden_layers=6, hidden_size=64, intermediate_size=64, vocab_size=64
)
DEEPSEEK = transformers.DeepseekV3Config(num_hidden_layers=5, n_routed_experts=8, hidden_size=64)


@pytest.mark.parametrize(("config", "layers"), [(RECURRENT_GEMMA, 3), (DEEPSEEK, 4)])
def test_the_longest_sequence_is_that_of_all_kinds_of_layers(
    wallfacer, folder: str, monkeypatch, config, layers: int
) -> None:
    """RecurrentGemma's third layer is its first with attention; DeepSeek has three dense ones."""
    config.save_pretrained(folder)
    counts = list[int]()

    def record(model, *_):  # captured, they would take minutes
        counts.append(len(model.model.layers))
        raise BudgetError

    monkeypatch.setattr(command, "memory_profiles", record)
    args = ("--seqlen", "8", "--attention", "eager", "--max-memory", "1GB", "--longest")
    assert wallfacer("chunk", "--model", folder, *args)[0] == 2
    assert counts == [layers, config.num_hidden_layers]


def test_a_longest_sequence_below_the_step_is_not_called_0(wallfacer, folder: str) -> None:
    args = ("--seqlen", "64", "--layers", "1", "--max-memory", "20MB", "--longest")
    code, out, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 0 and "longest sequence within 20MB: less than 1024 tokens" in out, err


def test_a_sequence_that_does_not_fit_is_answered_with_the_longest(wallfacer, folder: str) -> None:
    args = ("--seqlen", "8192", "--layers", "1", "--max-memory", "250MB", "--longest", "--json")
    code, out, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 0 and "8192 tokens: max_memory=250000000 bytes" in err
    plan = json.loads(out)
    assert plan["seqlen"] == plan["longest_sequence"] == LONGEST and plan["plan"]["peak"] <= 250e6


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 64}


def test_the_longest_sequence_has_at_most_the_learned_positions(wallfacer, folder) -> None:
    transformers.GPT2Config(**SMALL, n_positions=2048).save_pretrained(folder)
    args = ("--seqlen", "64", "--max-memory", "1GB", "--longest", "--json")
    _, out, err = wallfacer("chunk", "--model", folder, *args)
    assert json.loads(out)["longest_sequence"] == 2048
    assert "not 3072 tokens: --seqlen 3072: GPT2LMHeadModel has 2048 positions" in err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GPT2Config(**SMALL, n_positions=32), "has 32 positions"),
        (transformers.OPTConfig(**SMALL, max_position_embeddings=63), "has 63 positions"),
        (transformers.ViTConfig(), "ViTModel takes pixel_values"),
        (transformers.ResNetConfig(), "ResNetModel takes pixel_values"),
        (transformers.MambaConfig(), "MambaForCausalLM has no attention 'sdpa'"),
        (transformers.AlignConfig(), "no class for AlignTextConfig (model_type 'align_text_model'"),
    ],
    ids=["gpt2", "opt", "vit", "resnet", "mamba", "align"],
)
def test_a_model_that_cannot_take_the_tokens_is_refused(
    wallfacer, folder: str, config, message: str
) -> None:
    config.save_pretrained(folder)
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "64", "--layers", "1")
    assert code == 2 and message in err


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTJConfig(**SMALL, n_positions=32, rotary_dim=4),
        transformers.CTRLConfig(**SMALL, n_positions=32, dff=16),
    ],
)
def test_more_tokens_than_a_computed_table_has_positions_are_refused(
    wallfacer, folder: str, config
) -> None:
    config.save_pretrained(folder)
    args = ("--seqlen", "33", "--attention", "eager")
    code, _, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 2 and "has 32 positions" in err


T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
ONE_LAYER = SMALL | {"num_hidden_layers": 1, "intermediate_size": 16}
MLLAMA = ONE_LAYER | {"num_key_value_heads": 2, "pad_token_id": 0}
MLLAMA |= {"cross_attention_layers": [], "rope_scaling": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (transformers.T5Config(**T5), "eager"),
        (transformers.CLIPConfig(text_config=ONE_LAYER), "sdpa"),
        (transformers.LlavaConfig(text_config=transformers.LlamaConfig(**ONE_LAYER)), "sdpa"),
        (transformers.MllamaConfig(text_config=MLLAMA), "sdpa"),
        (transformers.ModernBertConfig(**ONE_LAYER, pad_token_id=0), "sdpa"),
    ],
    ids=["t5", "clip", "llava", "mllama", "modernbert"],
)
def test_the_tokens_of_a_model_with_several_parts(wallfacer_json, folder, config, attention):
    """An encoder and a decoder get them both; of other models it is the part for text."""
    config.save_pretrained(folder)
    args = ("--seqlen", "64", "--attention", attention)
    plan = wallfacer_json("chunk", "--model", folder, *args)["plan"]
    assert 0 < plan["peak"] <= plan["peak_before"]


BART = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64}
BART |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 3, "decoder_layers": 4}
DEBERTA = SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
LLAMA = SMALL | {"intermediate_size": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("model_class", "sizes", "arguments"),
    [
        (transformers.GPT2LMHeadModel, SMALL, {"use_cache": False}),
        (transformers.LlamaForCausalLM, LLAMA, {"use_cache": False}),
        (transformers.BartModel, BART, {"use_cache": False, "decoder_input_ids": ...}),
        (transformers.DebertaModel, DEBERTA, {}),
        (
            transformers.CTRLLMHeadModel,
            {**SMALL, "dff": 64, "n_positions": 512},
            {"use_cache": False},
        ),
    ],
    ids=["gpt2", "llama", "bart", "deberta", "ctrl"],
)
def test_the_plan_is_that_of_the_model_itself(
    wallfacer_json, folder, model_class, sizes, arguments
):
    """Tied weights, tensors that are attributes and buffers, and two inputs are as in the model;
    DeBERTa makes tensors inside TorchScript, which are not fake; CTRL's positions are an attribute
    of the model, and a buffer of what the command captures."""
    config = model_class.config_class(**sizes)
    config.save_pretrained(folder)
    args = ("--seqlen", "512", "--max-memory", "0.6", "--max-slowdown", "9", "--attention", "eager")
    data = wallfacer_json("chunk", "--model", folder, *args)
    plan = ChunkPlan.from_json(json.dumps(data["plan"]))
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    draws = {name: torch.randint(3, 64, (1, 512)) for name in ("input_ids", "decoder_input_ids")}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # GPT-2's since 5
        arguments = arguments | {"logits_to_keep": 1}
    filled = {name: draws[name] if x is ... else x for name, x in arguments.items()}
    inputs = {"input_ids": draws["input_ids"], **filled}
    chunked = autochunk(model, kwargs=inputs, plan=plan)
    assert plan.regions and measured_peak(chunked, inputs) == pytest.approx(plan.peak, rel=0.05)
    with torch.no_grad():
        assert relative_error(chunked(**inputs), model(**inputs)) < 1e-5


@pytest.mark.parametrize("config", [transformers.BartConfig(**BART), transformers.T5Config()])
def test_layers_are_those_of_the_encoder_and_of_the_decoder(folder: str, config) -> None:
    config.save_pretrained(folder)
    model, _ = skeleton(Path(folder), 8, 1, "eager", 1)
    kinds = transformers.models.bart.modeling_bart, transformers.models.t5.modeling_t5
    kinds = kinds[0].BartEncoderLayer, kinds[0].BartDecoderLayer, kinds[1].T5Block
    assert sum(isinstance(module, kinds) for module in model.modules()) == 2


def test_the_first_layers_share_no_more_caches_than_in_the_whole_model() -> None:
    """Of Gemma 3n's layers the last ones read the keys of others."""
    shared = list[int]()
    for layers in (2, 5):
        config = transformers.GPT2Config(n_layer=6, num_kv_shared_layers=3)
        keep_layers(config, layers)
        shared.append(config.num_kv_shared_layers)
    assert shared == [0, 2]
    with pytest.raises(NotImplementedError, match="PretrainedConfig|PreTrainedConfig"):
        keep_layers(transformers.PretrainedConfig(), 1)  # as Blt's
    model = torch.nn.Module()
    model.config = transformers.PretrainedConfig()
    assert layers_of_all_kinds(model) == 0  # all


def test_a_prefill_has_no_cache_where_the_forward_passes_the_argument_on(folder: str) -> None:
    """As that of Granite's mixtures in transformers 5, whose signature does not name it."""
    transformers.GraniteMoeConfig(**ONE_LAYER, num_key_value_heads=2).save_pretrained(folder)
    assert skeleton(Path(folder), 8, 1, "eager", 1)[1]["use_cache"] is False


def test_a_model_whose_positions_are_a_plain_attribute(wallfacer_json, folder) -> None:
    """torch.export takes no constant that is a fake tensor: they are made buffers."""
    transformers.CTRLConfig(**SMALL, dff=16).save_pretrained(folder)
    args = ("--seqlen", "64", "--attention", "eager")
    assert wallfacer_json("chunk", "--model", folder, *args)["plan"]["peak"]


def test_a_model_that_converts_modules_while_it_is_built(wallfacer, folder, monkeypatch) -> None:
    """As DeepSeek-V4 and HY-V4 of transformers 5 do; torch converts no module of fake tensors."""
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm

    class Norm(norm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.float().bfloat16()

    monkeypatch.setattr(transformers.models.llama.modeling_llama, norm.__name__, Norm)
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "64")
    assert code == 0, err


def test_the_first_layers_are_of_the_kinds_that_they_have_in_the_whole_model(wallfacer, folder):
    """Zamba 2 looks for its shared blocks in a list of the kinds of all layers.

    No graph of it can be made in transformers 4, where it reads values of tensors.
    """
    kinds = ["mamba", "mamba", "hybrid", "mamba"] * 2
    sizes = SMALL | {"num_hidden_layers": 8, "hidden_size": 64}
    transformers.Zamba2Config(**sizes, layers_block_type=kinds).save_pretrained(folder)
    args = ("--seqlen", "64", "--layers", "2", "--attention", "eager")
    code, _, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 0 or "depends on the values of tensors" in err  # not StopIteration


def test_the_part_for_text_has_the_dtype_of_the_whole_model(wallfacer_json, folder) -> None:
    args = ("chunk", "--model", folder, "--seqlen", "64")
    peaks = []
    for dtype in ("float32", "bfloat16"):
        text = transformers.LlamaConfig(**ONE_LAYER)
        transformers.LlavaConfig(text_config=text, torch_dtype=dtype).save_pretrained(folder)
        peaks.append(wallfacer_json(*args)["plan"]["peak_before"])
    assert peaks[1] < 0.8 * peaks[0]


def test_rotary_positions_have_no_end(wallfacer_json, folder: str) -> None:
    """This model has a table of positions all the same."""
    positions = {"position_embedding_type": "rotary", "max_position_embeddings": 32}
    tokens = {"pad_token_id": 1, "mask_token_id": 2, "intermediate_size": 8}
    transformers.EsmConfig(**SMALL, **positions, **tokens).save_pretrained(folder)
    args = ("--seqlen", "64", "--attention", "eager")
    assert wallfacer_json("chunk", "--model", folder, *args)["plan"]["peak"]


@pytest.mark.parametrize(
    ("args", "message"),
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
def test_bad_options_are_refused(
    wallfacer, folder: str, args: tuple[str, ...], message: str
) -> None:
    code, _, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 2
    assert message in err


def change_config(folder: str, **changes: object) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_closest_plan_never_needs_more_than_the_unchunked_model(wallfacer, folder: str) -> None:
    """In a model this small, slices may cost more memory than they save."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    change_config(folder, torch_dtype="float32", **heads, **sizes)
    args = ("--seqlen", "4096", "--max-memory", "100kB")
    code, _, err = wallfacer("chunk", "--model", folder, *args)
    closest, unchunked = map(int, re.findall(r"(?:needs|unchunked:) (\d+)", err))
    assert code == 2 and closest <= unchunked


@pytest.mark.parametrize("args", [("--max-memory", "1.5"), ("--max-slowdown", "-1")])
def test_a_bad_budget_is_refused_before_the_model_is_read(
    wallfacer, folder, monkeypatch, args
) -> None:
    monkeypatch.setattr(command, "call_reader", lambda *_: pytest.fail("work has begun"))
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "8", *args)
    assert code == 2 and f"got {float(args[1])}" in err


def test_the_picture_shows_a_share_of_the_memory_as_a_budget_in_bytes(
    wallfacer_json, folder, monkeypatch
) -> None:
    limits = list[int]()
    monkeypatch.setattr(command, "draw_memory", lambda _, limit, *__: limits.append(limit))
    args = ("--seqlen", "2048", "--layers", "1", "--max-memory", "0.9", "--picture", "a.png")
    plan = wallfacer_json("chunk", "--model", folder, *args)
    assert limits == [int(0.9 * plan["plan"]["peak_before"])]


def test_an_error_of_transformers_names_the_model(wallfacer, folder: str) -> None:
    change_config(folder, hidden_act="sine")
    code, _, err = wallfacer("chunk", "--model", folder, "--seqlen", "8")
    assert code == 2 and f"wallfacer: --model {folder}: KeyError: " in err
    assert "LlamaForCausalLM (model_type 'llama', transformers" in err


def test_a_folder_without_a_model_is_refused(wallfacer, tmp_path: Path) -> None:
    code, _, err = wallfacer("chunk", "--model", str(tmp_path), "--seqlen", "8")
    assert code == 2
    assert "there is no config.json" in err


def test_no_option_is_deprecated(wallfacer, folder: str) -> None:
    warning_once: Any = transformers.utils.logging.warning_once
    warning_once.cache_clear()  # it warns once a process
    args = ("--seqlen", "64", "--layers", "1")
    code, _, err = wallfacer("chunk", "--model", folder, *args)
    assert code == 0 and "deprecated" not in err
