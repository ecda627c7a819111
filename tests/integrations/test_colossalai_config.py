"""WallFacer for ColossalAI refuses by name: models, arguments, files, installations, CPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import ROOT, run_command, run_threads
from tests.integrations.colossalai_jobs import needs_colossalai

if importlib.util.find_spec("colossalai"):
    import transformers
    from colossalai.accelerator import get_accelerator
    from colossalai.kernel.kernel_loader import CPUAdamLoader
    from colossalai.shardformer.layer.parallel_module import ParallelModule
    from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy
    from peft import LoraConfig, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.integrations.colossalai_models import batch, build
    from tests.integrations.transformers_models import sequence_parallel
    from wf_colossalai import (
        TABLE,
        AttentionModule,
        WallFacerPlugin,
        WallFacerPolicy,
        apply,
        config,
        doctor,
    )
    from wf_colossalai.attach import attach
    from wf_colossalai.cpu import cpu_accelerator
    from wf_colossalai.table import find

pytestmark = needs_colossalai
SUPPORTED_VERSIONS = {
    "torch": "2.13.0+cpu",
    "transformers": "4.51.3",
    "colossalai": "0.5.0",
    **dict.fromkeys(("accelerate", "bitsandbytes", "click", "einops", "fabric"), "1"),
    **dict.fromkeys(("psutil", "safetensors", "galore_torch", "peft"), "1"),
}


def test_an_unknown_model_is_refused_with_a_list_of_the_known() -> None:
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 8}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration.*T5Attention") as refusal:
        find(T5ForConditionalGeneration(T5Config(**sizes)), TABLE)
    for part in ("LlamaAttention", "GPT2Attention", "ViTSelfAttention", "ten lines"):
        assert part in str(refusal.value)


def bloom() -> Any:
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("qwen3"), "ColossalAI has no policy for Qwen3ForCausalLM: set tp_size=1"),
        (bloom, "tensor parallelism of ALiBi .BloomForCausalLM"),
    ],
)
def test_tensor_parallelism_that_would_be_wrong_is_refused(
    model: Callable[[], Any], message: str
) -> None:
    policy: Any = WallFacerPolicy()
    policy.table = TABLE | {"BloomAttention": AttentionModule()}
    policy.set_model(model())
    policy.shard_config = SimpleNamespace(
        sequence_parallelism_mode="ring_attn",
        pipeline_stage_manager=None,
        enable_tensor_parallelism=True,
    )
    with pytest.raises(NotImplementedError, match=message):
        policy.config_sanity_check()


def test_apply_refuses_a_model_that_a_plugin_has_split_by_tensor_parallelism() -> None:
    """`GeminiPlugin(tp_size=2)`; here the group of one layer is made up."""
    model = build("llama")
    apply(model, {"sequence_parallel_size": 1})
    split: Any = model.model.layers[0].mlp.up_proj
    split.__class__ = type("Linear1D_Col", (torch.nn.Linear, ParallelModule), {})
    split.process_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(NotImplementedError, match="tp_size=2.*layers.0.mlp.up_proj.*tp_size=1"):
        model(**batch("llama", "plain", 0))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel is neither.*ForCausalLM"):
        find(transformers.LlamaModel(build("llama").config), TABLE)


def with_lora(family: str, task_type: str) -> Any:
    modules = ["q_proj", "v_proj"]
    lora = LoraConfig(task_type=task_type, r=2, target_modules=modules, init_lora_weights=False)
    return get_peft_model(build(family), lora)


def test_lora_on_a_classifier_is_refused() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match="another head than a language model's"):
            attach(with_lora("llama_classes", "SEQ_CLS"), sequence_parallel(comm), TABLE)

    run_threads(2, rank)


def test_an_error_leaves_the_model_as_it_was() -> None:
    """It is attached already, and keeps the attention that it has."""

    def rank(comm: Any) -> None:
        model, sp = build("llama"), sequence_parallel(comm)
        with attach(model, sp, TABLE) as handle:
            with pytest.raises(ValueError, match="takes whole batches already"):
                attach(model, sp, TABLE)
            assert model.config._attn_implementation == handle.name

    run_threads(2, rank)


def test_a_model_with_lora_has_the_loss_and_gradients_of_one_process() -> None:
    models = [with_lora("llama", "CAUSAL_LM") for _ in range(3)]

    def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(**batch("llama", "ragged", 0)).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    def rank(comm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = models[comm.rank]
        model.load_state_dict(models[2].state_dict())
        with attach(model, sequence_parallel(comm), TABLE):
            return loss_and_gradients(model)

    (loss_0, grads_0), (loss_1, grads_1) = run_threads(2, rank)
    expected_loss, expected_grads = loss_and_gradients(models[2])
    mean = {name: (grads_0[name] + grads_1[name]) / 2 for name in expected_grads}
    torch.testing.assert_close((loss_0, loss_1), (expected_loss, expected_loss))
    torch.testing.assert_close(mean, expected_grads, rtol=1e-4, atol=1e-6)


def test_evaluation_that_reaches_only_the_models_children_gives_whole_logits() -> None:
    """As GeminiDDP.eval() does: it leaves the model itself in training mode."""
    models = [build("llama") for _ in range(2)]

    def rank(comm: Any) -> torch.Size:
        model = models[comm.rank]
        attach(model, sequence_parallel(comm), TABLE)
        for child in model.children():
            child.eval()
        with torch.no_grad():
            return model(**batch("llama", "ragged", 0)).logits.shape

    assert run_threads(2, rank) == [(1, 23, 256)] * 2


@pytest.mark.parametrize("argument", ["output_hidden_states", "logits_to_keep"])
def test_arguments_whose_result_would_cover_one_rank_alone_are_refused(argument: str) -> None:
    def rank(comm: Any) -> None:
        model = build("llama")
        with (
            attach(model, sequence_parallel(comm), TABLE),
            pytest.raises(NotImplementedError, match=f"{argument}.*leave"),
        ):
            model(batch("llama", "plain", 0)["input_ids"], **{argument: 1})

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sp_size": 4}, "sp_size=4.*sequence_parallel_size"),
        ({"inner_ring_size": 2}, "inner_ring_size=2.*double_ring"),
        ({"sequence_parallelism_mode": "ring"}, "sequence_parallelism_mode='ring'.*route"),
        ({"route": "rong"}, "rong"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size must be a positive"),
        ({"tp_size": "2"}, "tp_size must be a positive integer, got '2'"),
        ({"pp_size": 0}, "pp_size must be a positive integer, got 0"),
        ({"precision": "float32"}, "precision must be one of .*, got 'float32'"),
        ({"precision": "bf16", "zero_stage": 3}, "zero_stage must be 0, 1 or 2, got 3"),
        ({"activation_checkpointing": {"offload": "cpu"}}, 'offload" must be true or false'),
        ({"activation_checkpoint": {"offload": True}}, "did you mean .activation_checkpointing"),
    ],
)
def test_a_wrong_argument_of_the_plugin_is_refused_by_name(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WallFacerPlugin(**arguments)


def test_a_configuration_that_is_no_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a SequenceParallelConfig or a dict, got 4"):
        apply(build("llama"), 4)  # type: ignore[arg-type]


def test_a_custom_policy_without_wallfacer_is_refused() -> None:
    with pytest.raises(ValueError, match="custom_policy.*LlamaForCausalLMPolicy.*native="):
        WallFacerPlugin(sequence_parallel_size=2, custom_policy=LlamaForCausalLMPolicy())


def test_fp16_on_a_cpu_is_refused_outside_of_cpu_accelerator() -> None:
    with pytest.raises(NotImplementedError, match="fp16.*bf16.*fp32.*cpu_accelerator"):
        WallFacerPlugin(sequence_parallel_size=2, precision="fp16")


def test_a_gradient_checkpoint_config_is_refused_with_what_checkpoints() -> None:
    with pytest.raises(NotImplementedError, match="gradient_checkpointing_enable.. checkpoints"):
        WallFacerPlugin(sequence_parallel_size=2, gradient_checkpoint_config=object())


def test_zero_in_float32_is_refused_with_the_plugin_that_has_it() -> None:
    with pytest.raises(NotImplementedError, match="zero_stage=1.*LowLevelZeroPlugin"):
        WallFacerPlugin(sequence_parallel_size=2, zero_stage=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"wallfacr": {}}', '"wallfacr" is an unknown key; did you mean .wallfacer.'),
        ('{"zero_optimization": {}}', '"zero_optimization" is an unknown key.*"colossalai"'),
        ('{"wallfacer": 4}', '"wallfacer" must be a block .*got 4'),
        ("{", "no JSON"),
        ("[]", r"must hold an object {...}, got \[\]"),
        ('{"wallfacer": {}, "wallfacer": {}}', "key 'wallfacer' is given twice"),
        (
            '{"wallfacer": {"enabled": false, "activation_checkpointing": true}}',
            '"activation_checkpointing" must be a block',
        ),
        ('{"wallfacer": {"sequence_parallel_sise": 4}}', "sequence_parallel_sise.*did you mean"),
        ('{"colossalai": {"plugin": "gemini"}}', "wf_colossalai.from_config"),
    ],
)
def test_a_wrong_key_of_a_config_file_is_refused_by_name(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        WallFacerPlugin.from_config(path)


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        WallFacerPlugin.from_config(tmp_path / "none.json")


def test_a_loss_average_over_tokens_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="loss_average"):
        config.sequence_parallel_config({"wallfacer": {"loss_average": "token"}})


@pytest.mark.parametrize("file", [{"wallfacer": {"enabled": False, "route": "ring"}}, {}])
def test_a_config_without_an_enabled_block_means_one_rank(file: dict[str, Any]) -> None:
    assert config.sequence_parallel_config(file) == {"sequence_parallel_size": 1}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"enabled": "false"}, 'wallfacer.enabled" must be true or false, got "false"'),
        ({"enabled": False, "rote": "ring"}, "did you mean 'route'"),
        ({"enabled": False, "route": "rnig"}, "did you mean 'ring'"),
    ],
)
def test_a_block_that_is_not_enabled_is_checked_nevertheless(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config.sequence_parallel_config({"wallfacer": block})


@pytest.mark.parametrize(
    ("changed_versions", "parts_of_message"),
    [
        ({}, []),
        ({"torch": "2.5.1"}, ["torch is 2.5.1", "pip install torch==2.13.0", "--no-deps"]),
        ({"transformers": "4.53.0"}, ["transformers is 4.53.0", "transformers==4.51.3"]),
        ({"colossalai": None}, ["colossalai is missing", "--no-deps colossalai==0.5.0"]),
        ({"einops": None}, ["missing: einops", "wallfacer[colossalai]"]),
    ],
)
def test_doctor_names_the_package_and_the_command_that_installs_it(
    changed_versions: dict[str, Any], parts_of_message: list[str]
) -> None:
    versions = SUPPORTED_VERSIONS | changed_versions

    def version(package: str) -> str:
        if versions.get(package) is None:
            raise PackageNotFoundError(package)
        return versions[package]

    problems = doctor.problems(version)
    assert len(problems) == bool(parts_of_message)
    assert all(part in problems[0] for part in parts_of_message), problems


def test_import_of_wf_colossalai_fails_with_the_problem_that_doctor_finds() -> None:
    program = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '2.5.1' if name == 'torch' else real(name)\n"
        "import wf_colossalai"
    )
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == 1
    assert "ImportError: WallFacer for ColossalAI cannot start. torch is 2.5.1" in done.stdout


def test_cpu_accelerator_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="without a GPU"), cpu_accelerator():
        pass


def test_cpu_accelerator_restores_what_it_replaces() -> None:
    before = get_accelerator(), list(CPUAdamLoader.REGISTRY), torch.cuda.set_device
    had_hccl = hasattr(torch.distributed, "is_hccl_available")
    with cpu_accelerator():
        assert get_accelerator().name == "cuda"
    assert (get_accelerator(), list(CPUAdamLoader.REGISTRY), torch.cuda.set_device) == before
    assert hasattr(torch.distributed, "is_hccl_available") == had_hccl


ELSEWHERE = ("--exclude-dir=.venv*", "--exclude-dir=build")


def test_only_tests_and_the_example_use_cpu_accelerator() -> None:
    users = subprocess.run(
        ["grep", "-rl", "--include=*.py", *ELSEWHERE, "wf_colossalai.cpu", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    allowed = ("./tests/", "./examples/engine_colossalai.py")
    assert users and all(user.startswith(allowed) for user in users), users


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "colossalai").glob("*.json")), ids=lambda path: path.stem
)
def test_published_settings_are_accepted(path: Path) -> None:
    settings = config.load(path)
    assert config.sequence_parallel_config(settings)["sequence_parallel_size"] > 1
    assert settings["optimizer"]["type"]
