"""A fault on one of three ranks ends the job soon, on every transport, with a report."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.helpers import MPIRUN, ROOT, python, run_command

pytestmark = pytest.mark.processes
TORCHRUN = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "3"]
ENDS_WITHIN_S = 20.0  # on a busy machine; a circle of waits is found after 8 s


def run_fault(
    folder: Path,
    fault: str,
    transport: str,
    *options: str,
    launcher: str = "mpi",
    start: Sequence[str] = (),
) -> str:
    """Run a job of 3 ranks in which rank 1 has the fault, and check that it ends soon; its output.

    Args:
        fault, transport, options: of benchmarks/fault_rank.py.
        start: of the command of a rank, in place of `python()`.
    """
    launch = [*MPIRUN, "-n", "3"] if launcher == "mpi" else [sys.executable, *TORCHRUN]
    rank = [*(start or python()), str(ROOT / "benchmarks" / "fault_rank.py")]
    time_of_fault = folder / "fault"
    for _ in range(2):  # on a busy machine mpirun may fail to start the ranks
        done = run_command([*launch, *rank, fault, transport, str(folder), *options], timeout=100)
        if time_of_fault.exists():
            break
    assert time_of_fault.exists(), done.stdout
    seconds = time.time() - float(time_of_fault.read_text())
    assert seconds < ENDS_WITHIN_S, (seconds, done.stdout)
    assert done.returncode != 0 and "is through" not in done.stdout, done.stdout
    return done.stdout


def run_fault_until(
    reported: Callable[[str], bool],
    folder: Path,
    fault: str,
    transport: str,
    *options: str,
    start: Sequence[str] = (),
) -> str:
    """`run_fault`, up to six times, until the output is as `reported` wants it.

    The launcher ends the ranks soon after one has ended: on a busy machine before they have
    reported.
    """
    printed = ""
    for attempt in range(6):
        attempt_folder = folder / str(attempt)
        attempt_folder.mkdir()
        printed = run_fault(attempt_folder, fault, transport, *options, start=start)
        if reported(printed):
            break
    return printed


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "transport"),
    [("raise", "gloo"), ("exit 3", "deepspeed"), ("raise", "mpi"), ("exit 0", "mpi")],
)
def test_a_rank_that_ends_under_mpirun_ends_the_job(fault: str, transport: str, tmp_path: Path):
    pytest.importorskip("mpi4py")
    start: Sequence[str] = ()
    if transport == "deepspeed":
        pytest.importorskip("deepspeed")
        from tests.integrations import deepspeed_jobs

        start = deepspeed_jobs.python()
    printed = run_fault(tmp_path, fault, transport, start=start)
    assert re.search("rank [02] of 3: .*(the|from|to) .*rank [01]", printed), printed
    assert ("a fault on purpose" in printed) == (fault == "raise")


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_a_job_over_mpi_at_the_timeout(rank: int, tmp_path: Path):
    """Rank 0 holds the store of the ranks' notes, which does not answer then."""
    pytest.importorskip("mpi4py")
    printed = run_fault(tmp_path, "stop", "mpi", "--timeout", "3", "--rank", str(rank))
    assert f"the message from rank {rank} failed: it did not end within 3 s" in printed, printed


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_backward_that_is_left_out_ends_the_job_and_is_named(transport: str, tmp_path: Path):
    """Over gloo all three ranks raise; over MPI the first error ends the job."""
    pytest.importorskip("mpi4py")

    def errors_of(printed: str) -> list[str]:
        return re.findall(r"RuntimeError: (rank \d of 3: .*)", printed)

    def is_complete(printed: str) -> bool:
        return transport == "mpi" or len(errors_of(printed)) == 3

    printed = run_fault_until(is_complete, tmp_path, "skip a backward", transport)
    errors = errors_of(printed)
    assert errors if transport == "mpi" else len(errors) == 3, printed
    for error in errors:
        assert "layer 'layers.1', backward" in error and "layer 'layers.0', backward" in error
    assert printed.count("fault report: ") == 1, printed


def test_a_call_without_a_name_that_is_left_out_ends_the_job_in_the_backward(tmp_path: Path):
    printed = run_fault(tmp_path, "skip a call", "gloo", "--unnamed", launcher="torchrun")
    message = re.search("ranks wait for each other, in different calls: .*", printed)
    assert message, printed
    assert "forward of attention call 9" in message[0]
    assert "backward of attention call 8" in message[0]


@pytest.mark.mpi
@pytest.mark.parametrize(("transport", "rank"), [("gloo", 1), ("gloo", 0), ("mpi", 1)])
def test_a_killed_rank_is_reported_before_mpirun_ends_the_others(
    transport: str, rank: int, tmp_path: Path
):
    pytest.importorskip("mpi4py")

    def has_report(printed: str) -> bool:
        return "fault report: " in printed

    fault = ("kill", transport, "--rank", str(rank))
    printed = run_fault_until(has_report, tmp_path, *fault, start=[sys.executable])
    report = (
        r"fault report: ranks \[.*\] answered, ranks \[.*\] did not; 'agreement' "
        r"\(layer 'layers.1', forward .*: rank \d for the"
    )
    assert re.search(report, printed), printed
    assert ("Rank 0 has ended" in printed) == (rank == 0)


def test_a_fault_under_torchrun_is_reported_by_one_rank_and_in_the_logs(tmp_path: Path):
    printed = run_fault(tmp_path, "raise", "gloo", launcher="torchrun")
    report = (
        "fault report: all answered; .*rank 0 for .* ended: rank 1 by Fault: a fault on purpose"
    )
    assert len(re.findall(report, printed)) == 1, printed
    assert re.search(report, (tmp_path / "faults.log").read_text())
