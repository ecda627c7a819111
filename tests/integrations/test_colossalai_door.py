"""The door from outside: launchers, JSON files, the example, installation, refusals by name."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import MPIRUN, ROOT, run_command, run_threads
from tests.integrations import colossalai_jobs
from tests.integrations.colossalai_jobs import needs_colossalai, relative

INSTALLED = importlib.util.find_spec("colossalai") is not None
if INSTALLED:
    import transformers
    from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.integrations.colossalai_models import alone, batch, build
    from tests.integrations.transformers_models import sequence_parallel
    from wf_colossalai import TABLE, WallFacerPlugin, config, doctor
    from wf_colossalai.attach import attach
    from wf_colossalai.cpu import cpu_accelerator
    from wf_colossalai.table import find

pytestmark = needs_colossalai
PROGRAM = str(Path(__file__).with_name("colossalai_program.py"))
CONFIGS = ROOT / "configs" / "colossalai"
EXAMPLE = ["examples/pretrain.py", "--seq-len", "128"]
FITS = {
    "torch": "2.13.0+cpu",
    "transformers": "4.51.3",
    "colossalai": "0.5.0",
    **dict.fromkeys(("accelerate", "bitsandbytes", "click", "einops", "fabric"), "1"),
    **dict.fromkeys(("psutil", "safetensors", "galore_torch", "peft"), "1"),
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(command: list[str]) -> str:
    done = run_command(command, 120, {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def launcher(name: str) -> list[str]:
    """The command that starts the program on 2 ranks, forks where the launcher starts anything."""
    scripts, fork = Path(sys.executable).parent, colossalai_jobs.python()
    if name == "torchrun":
        options = ["--nproc-per-node=2", f"--master-port={free_port()}", "--no-python"]
        return [str(scripts / "torchrun"), *options, *fork, PROGRAM, "torch"]
    if name == "colossalai run":
        port = f"--master_port={free_port()}"
        start = [str(scripts / "colossalai"), "run", "--nproc_per_node=2", port]
        return [*start, "--host=127.0.0.1", PROGRAM, "torch"]
    return [*MPIRUN, "-n", "2", *fork, PROGRAM, "openmpi", free_port()]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "torchrun",
        "colossalai run",
        pytest.param("mpirun, launch_from_openmpi", marks=pytest.mark.mpi),
    ],
)
def test_every_launcher_trains(name: str) -> None:
    """And launch.init() under mpirun, which the example calls."""
    losses = dict(re.findall(r"rank (\d) of 2: loss ([\d.]+)", run(launcher(name))))
    expected, _, _ = alone(build("llama"), [[batch("llama", "plain", 0)]], _Still)
    assert losses.keys() == {"0", "1"}
    assert all(relative(float(loss), expected[0]) < 1e-5 for loss in losses.values())


class _Still:
    """An optimizer that does nothing."""

    def __init__(self, parameters: Any) -> None:
        pass

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The main job through both doors, and through ours once more from a checkpoint in between."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("rich") is None:
        pytest.skip("the example needs mpirun and rich (the extras mpi and demo)")
    from tests.integrations import deepspeed_jobs

    python = {"colossalai": colossalai_jobs.python(), "deepspeed": deepspeed_jobs.python()}
    folder = tmp_path_factory.mktemp("example")

    def start(engine: str, out: str, *more: str) -> list[dict[str, str]]:
        path = str(ROOT / "configs" / engine / "zero2_concentric.json")
        options = ["--engine", engine, "--config", path, "--out", str(folder / out), *more]
        run([*MPIRUN, "-n", "4", *python[engine], *EXAMPLE, *options])
        with (folder / out / "loss.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    saved = start("colossalai", "ours", "--steps", "2", "--save-every", "2")
    resumed = start("colossalai", "ours", "--steps", "4", "--resume")
    theirs = start("deepspeed", "theirs", "--steps", "4")
    return {"saved": saved, "resumed": resumed, "deepspeed": theirs}


@pytest.mark.mpi
@pytest.mark.deepspeed
@pytest.mark.processes
def test_both_doors_have_the_same_loss_curve(curves: dict[str, list[dict[str, str]]]) -> None:
    """Also over a checkpoint: the first two steps were saved, the last two are another job's."""
    ours, theirs = curves["resumed"], curves["deepspeed"]
    assert len(curves["saved"]) == 2 and len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(float(mine["loss"]), float(other["loss"])) < 1e-5
        assert relative(float(mine["grad_norm"]), float(other["grad_norm"])) < 1e-5
        assert mine["step"] == other["step"]
        assert mine["bytes_sent"] == other["bytes_sent"]
        assert mine["tokens"] == other["tokens"]


def test_an_unknown_model_is_named_and_the_known_are_listed() -> None:
    words = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 8}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration.*T5Attention") as error:
        find(T5ForConditionalGeneration(T5Config(**words)), TABLE)
    for name in ("LlamaAttention", "GPT2Attention", "ViTSelfAttention", "ten lines"):
        assert name in str(error.value)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel is neither.*ForCausalLM"):
        find(transformers.LlamaModel(build("llama").config), TABLE)


@pytest.mark.parametrize("word", ["output_hidden_states", "logits_to_keep"])
def test_what_would_be_of_one_ranks_tokens_is_refused(word: str) -> None:
    def rank(comm: Any) -> None:
        model = build("llama")
        with (
            attach(model, sequence_parallel(comm), TABLE),
            pytest.raises(NotImplementedError, match=f"{word}.*leave"),
        ):
            model(batch("llama", "plain", 0)["input_ids"], **{word: 1})

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"sp_size": 4}, "sp_size=4.*sequence_parallel_size"),
        ({"inner_ring_size": 2}, "inner_ring_size=2.*double_ring"),
        ({"sequence_parallelism_mode": "ring"}, "sequence_parallelism_mode='ring'.*route"),
        ({"route": "rong"}, "rong"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size must be a positive"),
        ({"activation_checkpointing": {"offload": "cpu"}}, 'offload" must be true or false'),
        ({"activation_checkpoint": {"offload": True}}, "did you mean .activation_checkpointing"),
    ],
)
def test_a_wrong_word_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WallFacerPlugin(**words)


def test_a_policy_without_wallfacer_is_refused() -> None:
    with pytest.raises(ValueError, match="custom_policy.*LlamaForCausalLMPolicy.*native="):
        WallFacerPlugin(sequence_parallel_size=2, custom_policy=LlamaForCausalLMPolicy())


def test_fp16_on_a_cpu_is_said_to_need_the_stand_in() -> None:
    with pytest.raises(NotImplementedError, match="fp16.*bf16.*fp32.*cpu_accelerator"):
        WallFacerPlugin(sequence_parallel_size=2, precision="fp16")


def test_zero_in_float32_is_said_to_be_elsewhere() -> None:
    with pytest.raises(NotImplementedError, match="zero_stage=1.*LowLevelZeroPlugin"):
        WallFacerPlugin(sequence_parallel_size=2, zero_stage=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"wallfacr": {}}', '"wallfacr" is no known key; did you mean .wallfacer.'),
        ('{"zero_optimization": {}}', '"zero_optimization" is no known key.*"colossalai"'),
        ('{"wallfacer": 4}', '"wallfacer" must be a block .*got 4'),
        ("{", "no JSON"),
        (
            '{"wallfacer": {"enabled": false, "activation_checkpointing": true}}',
            '"activation_checkpointing" must be a block',
        ),
        ('{"wallfacer": {"sequence_parallel_sise": 4}}', "sequence_parallel_sise.*did you mean"),
        ('{"colossalai": {"plugin": "gemini"}}', "wf_colossalai.from_config"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        WallFacerPlugin.from_config(path)


def test_a_missing_file_and_a_token_average_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        WallFacerPlugin.from_config(tmp_path / "none.json")
    with pytest.raises(NotImplementedError, match="loss_average"):
        config.sequence_parallel_config({"wallfacer": {"loss_average": "token"}})


def test_a_block_that_is_not_enabled_switches_off() -> None:
    words = config.sequence_parallel_config({"wallfacer": {"enabled": False, "route": "ring"}})
    assert words == {"sequence_parallel_size": 1}
    assert config.sequence_parallel_config({}) == words


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"enabled": "false"}, 'wallfacer.enabled" must be true or false, got "false"'),
        ({"enabled": False, "rote": "ring"}, "did you mean 'route'"),
        ({"enabled": False, "route": "rnig"}, "did you mean 'ring'"),
    ],
)
def test_a_block_that_is_not_enabled_is_checked_all_the_same(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config.sequence_parallel_config({"wallfacer": block})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"torch": "2.5.1"}, ["torch is 2.5.1", "pip install torch==2.13.0", "--no-deps"]),
        ({"transformers": "4.53.0"}, ["transformers is 4.53.0", "transformers==4.51.3"]),
        ({"colossalai": None}, ["colossalai is missing", "--no-deps colossalai==0.5.0"]),
        ({"einops": None}, ["missing: einops", "wallfacer[colossalai]"]),
    ],
)
def test_the_door_says_what_to_type(changed: dict[str, Any], expected: list[str]) -> None:
    have = FITS | changed

    def installed(package: str) -> str:
        if have.get(package) is None:
            raise PackageNotFoundError(package)
        return have[package]

    found = doctor.problems(installed)
    assert len(found) == bool(expected)
    for words in expected:
        assert words in found[0]


def test_importing_the_door_says_it_too() -> None:
    program = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '2.5.1' if name == 'torch' else real(name)\n"
        "import wf_colossalai"
    )
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == 1
    assert "ImportError: WallFacer for ColossalAI cannot start. torch is 2.5.1" in done.stdout


def test_the_cpu_stand_in_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="without a GPU"), cpu_accelerator():
        pass


def test_the_cpu_stand_in_takes_itself_back() -> None:
    import torch
    from colossalai.accelerator import get_accelerator
    from colossalai.kernel.kernel_loader import CPUAdamLoader

    before = get_accelerator(), list(CPUAdamLoader.REGISTRY), torch.cuda.set_device
    had = hasattr(torch.distributed, "is_hccl_available")
    with cpu_accelerator():
        assert get_accelerator().name == "cuda"
    assert (get_accelerator(), list(CPUAdamLoader.REGISTRY), torch.cuda.set_device) == before
    assert hasattr(torch.distributed, "is_hccl_available") == had


def test_nothing_but_tests_and_the_example_uses_the_cpu_stand_in() -> None:
    users = subprocess.run(
        ["grep", "-rl", "--include=*.py", "wf_colossalai.cpu", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    allowed = ("./tests/", "./examples/engine_colossalai.py", "./.venv/", "./build/")
    assert users and all(user.startswith(allowed) for user in users), users


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_settings_are_well_formed(path: Path) -> None:
    loaded = config.load(path)
    assert config.sequence_parallel_config(loaded)["sequence_parallel_size"] > 1
    assert json.dumps(loaded["optimizer"])
