"""WallFacer for ColossalAI refuses by name: arguments, files, installations, CPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT, run_command
from tests.integrations.colossalai_jobs import needs_colossalai

if importlib.util.find_spec("colossalai"):
    from colossalai.accelerator import get_accelerator
    from colossalai.kernel.kernel_loader import CPUAdamLoader
    from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy

    from tests.integrations.colossalai_models import build
    from wf_colossalai import (
        WallFacerPlugin,
        apply,
        config,
        doctor,
        from_config,
    )
    from wf_colossalai.cpu import cpu_accelerator

pytestmark = needs_colossalai
SUPPORTED_VERSIONS = {
    "torch": "2.13.0+cpu",
    "transformers": "4.51.3",
    "colossalai": "0.5.0",
    **dict.fromkeys(("accelerate", "bitsandbytes", "click", "einops", "fabric"), "1"),
    **dict.fromkeys(("psutil", "safetensors", "galore_torch", "peft"), "1"),
}


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


def test_an_argument_that_another_plugin_lacks_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"colossalai": {"plugin": "low_level_zero", "stge": 2}}')
    message = '"colossalai.stge" is no argument of LowLevelZeroPlugin; did you mean .stage.'
    with pytest.raises(ValueError, match=message):
        from_config(path, build("llama"))


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        WallFacerPlugin.from_config(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        WallFacerPlugin.from_config(tmp_path)


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
