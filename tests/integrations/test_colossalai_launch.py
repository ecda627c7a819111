"""Training with ColossalAI under every launcher; the example trains as it does with DeepSpeed."""

from __future__ import annotations

import csv
import importlib.util
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import MPIRUN, ROOT, run_command
from tests.integrations import colossalai_jobs
from tests.integrations.colossalai_jobs import needs_colossalai, relative

if importlib.util.find_spec("colossalai"):
    from tests.integrations.colossalai_models import batch, build, train_alone

pytestmark = [needs_colossalai, pytest.mark.processes]
PROGRAM = str(Path(__file__).with_name("colossalai_program.py"))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def output_of(command: list[str]) -> str:
    """What a command prints; it must succeed."""
    done = run_command(command, 120, {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def launch_command(launcher: str) -> list[str]:
    """The command that starts PROGRAM on 2 ranks: forks, if the launcher starts any command."""
    scripts, fork = Path(sys.executable).parent, colossalai_jobs.python()
    if launcher == "torchrun":
        options = ["--nproc-per-node=2", f"--master-port={free_port()}", "--no-python"]
        return [str(scripts / "torchrun"), *options, *fork, PROGRAM, "torch"]
    if launcher == "colossalai run":
        options = ["--nproc_per_node=2", f"--master_port={free_port()}", "--host=127.0.0.1"]
        return [str(scripts / "colossalai"), "run", *options, PROGRAM, "torch"]
    return [*MPIRUN, "-n", "2", *fork, PROGRAM, "openmpi", free_port()]


class NoStep:
    """An optimizer that does nothing."""

    def __init__(self, parameters: Any) -> None:
        pass

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        "colossalai run",
        pytest.param("mpirun, launch_from_openmpi", marks=pytest.mark.mpi),
    ],
)
def test_the_loss_under_every_launcher_is_that_of_one_process(launcher: str) -> None:
    """To 1e-5, of the six decimals that PROGRAM prints."""
    output = output_of(launch_command(launcher))
    losses = dict(re.findall(r"rank (\d) of 2: loss ([\d.]+)", output))
    (expected,), _, _ = train_alone(build("llama"), [[batch("llama", "plain", 0)]], NoStep)
    assert losses.keys() == {"0", "1"}
    assert all(relative(float(loss), expected) < 1e-5 for loss in losses.values())


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """loss.csv of the example: with ColossalAI in two jobs, with DeepSpeed in one."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("rich") is None:
        pytest.skip("the example needs mpirun and rich (the extras mpi and demo)")
    from tests.integrations import deepspeed_jobs

    python = {"colossalai": colossalai_jobs.python(), "deepspeed": deepspeed_jobs.python()}
    folder = tmp_path_factory.mktemp("example")

    def train(engine: str, *options: str) -> list[dict[str, str]]:
        config = str(ROOT / "configs" / engine / "zero2_concentric.json")
        out = folder / engine
        example = ["examples/pretrain.py", "--seq-len", "128", "--engine", engine]
        output_of(
            [*MPIRUN, "-n", "4", *python[engine], *example, "--config", config, "--out", str(out)]
            + [*options]
        )
        with (out / "loss.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return {
        "saved": train("colossalai", "--steps", "2", "--save-every", "2"),
        "resumed": train("colossalai", "--steps", "4", "--resume"),
        "deepspeed": train("deepspeed", "--steps", "4"),
    }


@pytest.mark.mpi
@pytest.mark.deepspeed
def test_the_example_has_the_same_curve_with_colossalai_and_deepspeed(
    curves: dict[str, list[dict[str, str]]],
) -> None:
    """Loss, gradient norm, tokens and bytes of each step, over a checkpoint after the second."""
    colossalai, deepspeed = curves["resumed"], curves["deepspeed"]
    assert len(curves["saved"]) == 2 and len(colossalai) == len(deepspeed) == 4
    for actual, expected in zip(colossalai, deepspeed, strict=True):
        assert relative(float(actual["loss"]), float(expected["loss"])) < 1e-5
        assert relative(float(actual["grad_norm"]), float(expected["grad_norm"])) < 1e-5
        for column in ("step", "bytes_sent", "tokens"):
            assert actual[column] == expected[column]
