"""A job of examples/pretrain.py that loses a rank goes on from its last checkpoint, by itself."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.helpers import ROOT

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes
CONFIG = "configs/torch/fsdp_ring_data_parallel.json"
STEPS, SAVED = 4, 2


def start(out: Path, ranks: int, *more: str) -> subprocess.Popen[str]:
    """The example under torchrun, with checkpoints."""
    launch = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(ranks)]
    rank = [*forked.python("tests.helpers", "transformers.models.llama"), "examples/pretrain.py"]
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


def kill_a_rank(job: subprocess.Popen[str], out: Path) -> None:
    """kill -9 of the last rank, as soon as there is a checkpoint."""
    end = time.monotonic() + 100
    while not (out / "checkpoints" / "latest").exists():
        assert time.monotonic() < end and job.poll() is None, ended(job)
        time.sleep(0.02)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks by /proc")
def test_a_killed_job_goes_on_by_itself_and_on_fewer_ranks(tmp_path: Path) -> None:
    whole, killed, fewer = (tmp_path / name for name in ("whole", "killed", "fewer"))
    ended(start(whole, 2))
    job = start(killed, 2)
    kill_a_rank(job, killed)
    printed = ended(job)
    assert f"goes on from {killed}/checkpoints/step{SAVED}, restart 1" in printed, printed
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-5)
    shutil.copytree(whole, fewer)
    printed = ended(start(fewer, 1, "--resume", "--resume-tag", f"step{SAVED}"))
    assert "1 ranks: sequence_parallel_size 1" in printed, printed
    assert losses(fewer) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(whole)) == STEPS
