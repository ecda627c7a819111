"""A fault on one rank ends the job soon, on every transport, and never leaves it waiting."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import MPIRUN, ROOT, python, run_command

pytestmark = pytest.mark.processes
TORCHRUN = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "3"]
ENDS_WITHIN_S = 20.0  # on a busy machine; a circle of waits is broken after 8 s


def run_fault(
    folder: Path,
    kind: str,
    transport: str,
    *more: str,
    launcher: str = "mpi",
    start: Sequence[str] = (),
) -> str:
    """What a job of 3 ranks printed, in which rank 1 makes a fault; it ends soon after it."""
    several = [*MPIRUN, "-n", "3"] if launcher == "mpi" else [sys.executable, *TORCHRUN]
    rank = [*(start or python()), str(ROOT / "benchmarks" / "fault_rank.py")]
    fault = folder / "fault"
    for _ in range(2):  # beside other jobs one of MPI may not start
        done = run_command([*several, *rank, kind, transport, str(folder), *more], timeout=100)
        if fault.exists():
            break
    assert fault.exists(), done.stdout
    took = time.time() - float(fault.read_text())
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
    start: Sequence[str] = ()
    if transport == "deepspeed":
        pytest.importorskip("deepspeed")
        from tests.integrations import deepspeed_jobs

        start = deepspeed_jobs.python()
    printed = run_fault(tmp_path, kind, transport, start=start)
    assert re.search("rank [02] of 3: .*(the|from|to) .*rank [01]", printed), printed
    assert ("a fault on purpose" in printed) == (kind == "raise")


@pytest.mark.mpi
def test_a_stopped_rank_ends_a_job_of_mpi_at_the_timeout(tmp_path: Path):
    pytest.importorskip("mpi4py")
    printed = run_fault(tmp_path, "stop", "mpi", "--timeout", "3")
    assert "the message from rank 1 failed: it did not end within 3 s" in printed, printed


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_backward_that_is_left_out_ends_the_job_and_is_named(transport: str, tmp_path: Path):
    pytest.importorskip("mpi4py")
    for attempt in range(
        3
    ):  # the first that fails ends the others, which may not have told by then
        folder = tmp_path / str(attempt)
        folder.mkdir()
        printed = run_fault(folder, "skip a backward", transport)
        errors = re.findall(r"RuntimeError: (rank \d of 3: .*)", printed)
        if len(errors) == 3 or transport == "mpi":
            break
    assert errors if transport == "mpi" else len(errors) == 3, printed
    for error in errors:
        assert "layer 'layers.1', backward" in error and "layer 'layers.0', backward" in error
    assert printed.count("fault report: ") == 1, printed


def test_a_call_without_a_name_that_is_left_out_ends_the_job_in_the_backward(tmp_path: Path):
    printed = run_fault(tmp_path, "skip a call", "gloo", "--unnamed", launcher="torchrun")
    told = re.search("ranks wait for each other, in different calls: .*", printed)
    assert told, printed
    assert "forward of attention call 9" in told[0] and "backward of attention call 8" in told[0]


@pytest.mark.mpi
@pytest.mark.parametrize(("transport", "rank"), [("gloo", 1), ("gloo", 0), ("mpi", 1)])
def test_a_killed_rank_is_reported_before_mpirun_ends_the_others(
    transport: str, rank: int, tmp_path: Path
):
    pytest.importorskip("mpi4py")
    for attempt in range(3):  # mpirun gives them 0.3 s, which is little on a busy machine
        folder = tmp_path / str(attempt)
        folder.mkdir()
        more = "--rank", str(rank)
        printed = run_fault(folder, "kill", transport, *more, start=[sys.executable])
        if "fault report: " in printed:
            break
    answered = r"fault report: ranks \[.*\] answered, ranks \[.*\] did not; 'agreement' "
    assert re.search(answered + r"\(layer 'layers.1', forward .*: rank \d for the", printed), (
        printed
    )
    assert ("Rank 0 has ended" in printed) == (rank == 0)


def test_a_fault_under_torchrun_is_reported_by_one_rank_and_in_the_logs(tmp_path: Path):
    printed = run_fault(tmp_path, "raise", "gloo", launcher="torchrun")
    report = (
        "fault report: all answered; .*rank 0 for .* ended: rank 1 by Fault: a fault on purpose"
    )
    assert len(re.findall(report, printed)) == 1, printed
    assert re.search(report, (tmp_path / "faults.log").read_text())
