"""A job of examples/pretrain.py that loses a rank continues from its last checkpoint by itself."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.deepspeed_jobs import python  # noqa: E402

pytestmark = pytest.mark.processes
CONFIG = "configs/torch/fsdp_ring_data_parallel.json"
NUM_STEPS, SAVE_EVERY = 4, 2
FINDS_RANKS_BY_PROC = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds ranks by /proc"
)


def start(out: Path, ranks: int, *options: str, agent: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start the example under torchrun, with checkpoints.

    Args:
        options: further options of the example. agent: of torchrun.
    """
    launch = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(ranks), *agent]
    rank = [*python(), "examples/pretrain.py"]
    args = ["--engine", "torch", "--config", CONFIG, "--seq-len", "128", "--timeout", "60"]
    args += ["--steps", str(NUM_STEPS), "--save-every", str(SAVE_EVERY), "--out", str(out)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return subprocess.Popen(
        [sys.executable, *launch, "--max-restarts", "2", *rank, *args, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def output_of(job: subprocess.Popen[str]) -> str:
    """Wait until the job has ended, and check that it succeeded."""
    printed, _ = job.communicate(timeout=200)
    assert job.returncode == 0, printed
    return printed


def wait_for_a_checkpoint(job: subprocess.Popen[str], out: Path) -> None:
    end = time.monotonic() + 100
    while not (out / "checkpoints" / "latest").exists():
        assert time.monotonic() < end and job.poll() is None, output_of(job)
        time.sleep(0.02)


def kill_a_rank(job: subprocess.Popen[str]) -> None:
    """Kill the last rank of the job's torchrun, by SIGKILL."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a job without a fault."""
    out = tmp_path_factory.mktemp("undisturbed")
    output_of(start(out, 2))
    return out


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@FINDS_RANKS_BY_PROC
def test_a_job_whose_rank_is_killed_continues_from_its_checkpoint(
    undisturbed: Path, tmp_path: Path
) -> None:
    job = start(tmp_path, 2)
    wait_for_a_checkpoint(job, tmp_path)
    kill_a_rank(job)
    printed = output_of(job)
    assert f"goes on from {tmp_path}/checkpoints/step{SAVE_EVERY}, restart 1" in printed, printed
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert len(losses(undisturbed)) == NUM_STEPS


def test_a_checkpoint_of_two_ranks_is_resumed_on_one(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "one_rank"
    shutil.copytree(undisturbed, out)
    printed = output_of(start(out, 1, "--resume", "--resume-tag", f"step{SAVE_EVERY}"))
    assert "1 ranks: sequence_parallel_size 1" in printed, printed
    assert losses(out) == pytest.approx(losses(undisturbed), rel=1e-5)


@FINDS_RANKS_BY_PROC
def test_a_job_that_loses_a_host_continues_on_the_other(undisturbed: Path, tmp_path: Path) -> None:
    """Two agents of torchrun with a rank each; one agent is killed with its rank."""
    out = tmp_path / "out"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    agent = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
    agent += ["--rdzv-conf", "last_call_timeout=10,keep_alive_interval=2"]
    surviving = start(out, 1, agent=agent)
    wait_until_listening(rendezvous)  # the first agent holds the store
    killed = start(out, 1, agent=agent)
    wait_for_a_checkpoint(surviving, out)
    kill_a_rank(killed)
    killed.kill()
    killed.communicate()
    printed = output_of(surviving)
    assert "1 ranks: sequence_parallel_size 1" in printed and ", restart 1" in printed, printed
    assert losses(out) == pytest.approx(losses(undisturbed), rel=1e-5)


def wait_until_listening(address: str) -> None:
    host, port = address.split(":")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nobody listens at {address}")
