"""A job of examples/pretrain.py that loses a rank goes on from its last checkpoint, by itself."""

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
STEPS, SAVED = 4, 2


def start(out: Path, ranks: int, *more: str, agent: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The example under torchrun, with checkpoints."""
    launch = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(ranks), *agent]
    rank = [*python(), "examples/pretrain.py"]
    words = ["--engine", "torch", "--config", CONFIG, "--seq-len", "128", "--timeout", "60"]
    words += ["--steps", str(STEPS), "--save-every", str(SAVED), "--out", str(out), *more]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return subprocess.Popen(
        [sys.executable, *launch, "--max-restarts", "2", *rank, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def ended(job: subprocess.Popen[str]) -> str:
    printed, _ = job.communicate(timeout=200)
    assert job.returncode == 0, printed
    return printed


def wait_for_a_checkpoint(job: subprocess.Popen[str], out: Path) -> None:
    end = time.monotonic() + 100
    while not (out / "checkpoints" / "latest").exists():
        assert time.monotonic() < end and job.poll() is None, ended(job)
        time.sleep(0.02)


def kill_a_rank(job: subprocess.Popen[str]) -> None:
    """kill -9 of the last rank."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job without a fault wrote."""
    out = tmp_path_factory.mktemp("whole")
    ended(start(out, 2))
    return out


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks by /proc")
def test_a_killed_job_goes_on_by_itself_and_on_fewer_ranks(whole: Path, tmp_path: Path) -> None:
    killed, fewer = (tmp_path / name for name in ("killed", "fewer"))
    job = start(killed, 2)
    wait_for_a_checkpoint(job, killed)
    kill_a_rank(job)
    printed = ended(job)
    assert f"goes on from {killed}/checkpoints/step{SAVED}, restart 1" in printed, printed
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-5)
    shutil.copytree(whole, fewer)
    printed = ended(start(fewer, 1, "--resume", "--resume-tag", f"step{SAVED}"))
    assert "1 ranks: sequence_parallel_size 1" in printed, printed
    assert losses(fewer) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(whole)) == STEPS


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks by /proc")
def test_a_job_that_loses_a_host_goes_on_with_fewer_ranks(whole: Path, tmp_path: Path) -> None:
    """Two agents of torchrun; one is killed with its rank, as a host that ends."""
    out = tmp_path / "out"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    agent = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
    agent += ["--rdzv-conf", "last_call_timeout=10,keep_alive_interval=2"]
    lives = start(out, 1, agent=agent)
    wait_until_listening(meeting)  # the first agent holds the store
    dies = start(out, 1, agent=agent)
    wait_for_a_checkpoint(lives, out)
    kill_a_rank(dies)
    dies.kill()
    dies.communicate()
    printed = ended(lives)
    assert "1 ranks: sequence_parallel_size 1" in printed and ", restart 1" in printed, printed
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5)


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
