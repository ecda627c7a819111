"""A fault on one rank ends the job soon, on every transport, and never leaves it waiting."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.helpers import MPIRUN, ROOT, run_command

pytestmark = pytest.mark.processes
TORCHRUN = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "3"]
ENDS_WITHIN_S = 10.0


def run_fault(folder: Path, kind: str, transport: str, *more: str, launcher: str = "mpi") -> str:
    """What a job of 3 ranks printed, in which rank 1 makes a fault; it ends soon after it."""
    start = [*MPIRUN, "-n", "3"] if launcher == "mpi" else [sys.executable, *TORCHRUN]
    rank = [*forked.python("tests.helpers"), str(ROOT / "benchmarks" / "fault_rank.py")]
    done = run_command([*start, *rank, kind, transport, str(folder), *more], timeout=100)
    took = time.time() - float((folder / "fault").read_text())
    assert took < ENDS_WITHIN_S, (took, done.stdout)
    assert done.returncode != 0 and "is through" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "transport"),
    [("raise", "gloo"), ("exit 3", "deepspeed"), ("raise", "mpi"), ("exit 0", "mpi")],
)
def test_a_rank_that_ends_under_mpirun_ends_the_job(kind: str, transport: str, tmp_path: Path):
    pytest.importorskip("mpi4py")
    if transport == "deepspeed":
        pytest.importorskip("deepspeed")
    printed = run_fault(tmp_path, kind, transport)
    assert re.search("rank [02] of 3: .*(the|from|to) .*rank [01]", printed), printed
    assert ("a fault on purpose" in printed) == (kind == "raise")


@pytest.mark.mpi
def test_a_stopped_rank_ends_a_job_of_mpi_at_the_timeout(tmp_path: Path):
    pytest.importorskip("mpi4py")
    printed = run_fault(tmp_path, "stop", "mpi", "--timeout", "3")
    assert "the message from rank 1 did not end within 3 s" in printed, printed
