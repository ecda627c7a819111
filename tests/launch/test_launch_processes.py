"""`launch.init()` joins the ranks under real launchers, without variables set by hand."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import comm_contract
from tests.dense import largest
from tests.helpers import MPIRUN, ROOT, python, run_command, run_processes
from wf_backends.comm import Board, Communicator
from wf_backends.launch import Launch, ending, init

PROGRAM = ["-m", "tests.launch_program"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]


def run(
    launcher: list[str], program: str, new_interpreters: bool = False, **environ: str
) -> list[dict[str, Any]]:
    """The report of each rank of tests/launch_program.py, by rank.

    Args:
        new_interpreters: each rank is a new interpreter instead of a fork.
    """
    start = [sys.executable] if new_interpreters else python()
    with TemporaryDirectory() as folder:
        command = [*launcher, *start, *PROGRAM, folder, program]
        done = run_command(command, timeout=240, environ=environ)
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert done.returncode == 0, done.stdout
    return sorted(reports, key=lambda report: report.get("rank", 0))


def assert_joined(reports: list[dict[str, Any]], launcher: str, size: int) -> None:
    """All ranks are on one host and report the same job."""
    assert [report["rank"] for report in reports] == list(range(size))
    assert sorted(report["local_rank"] for report in reports) == list(range(size))
    for report in reports:
        sizes = report["world_size"], report["local_size"]
        assert (report["launcher"], *sizes) == (launcher, size, size)
        assert report["sum of ranks"] == size * (size - 1) // 2
        assert (report["backend"], report["device"]) == ("gloo", "cpu")
        assert report["comm"] == "GroupComm"
        assert report["second init is equal"]
        assert f"rank {report['rank']} of {size}" in report["text"] and launcher in report["text"]
        assert_environ(report)


def assert_environ(report: dict[str, Any]) -> None:
    """The variables that deepspeed.init_distributed and accelerate read are set."""
    environ = report["environ"]
    fields = {
        "RANK": "rank",
        "WORLD_SIZE": "world_size",
        "LOCAL_RANK": "local_rank",
        "LOCAL_WORLD_SIZE": "local_size",
    }
    assert {name: environ[name] for name in fields} == {
        name: str(report[field]) for name, field in fields.items()
    }
    assert environ["MASTER_ADDR"] and int(environ["MASTER_PORT"]) > 0


@pytest.mark.mpi
def test_ranks_join_by_the_variables_of_open_mpi_or_else_through_mpi4py():
    pytest.importorskip("mpi4py")
    reports = run([*MPIRUN, "-n", "2"], "join_twice", new_interpreters=True)
    assert_joined(reports, "openmpi", 2)
    assert all(report["close undoes init"] for report in reports)
    assert_joined([report["without variables"] for report in reports], "mpi4py", 2)


@pytest.mark.mpi
def test_four_ranks_of_mpirun_meet_at_the_loopback():
    pytest.importorskip("mpi4py")
    reports = run([*MPIRUN, "-n", "4"], "join")
    assert_joined(reports, "openmpi", 4)
    assert {report["environ"]["MASTER_ADDR"] for report in reports} == {"127.0.0.1"}


@pytest.mark.mpi
def test_a_rank_that_never_joins_ends_the_job_of_mpirun_at_the_timeout(tmp_path: Path):
    """MPI_Init itself waits for it without end."""
    pytest.importorskip("mpi4py")
    command = [*MPIRUN, "-n", "2", *python(), *PROGRAM, str(tmp_path), "stay_away"]
    done = run_command(command, timeout=60)
    assert done.returncode == 1 and "in load_mpi" in done.stdout, done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_before_it_sends_by_mpi_is_named_long_before_the_timeout(rank: int):
    """It is at the end of Python, where MPI waits for all ranks. Rank 0 holds the job's store."""
    pytest.importorskip("mpi4py")
    reports = run([*MPIRUN, "-n", "2"], "end_early", ENDS=str(rank))
    (error,) = [report["error"] for report in reports if report["error"]]
    assert error == f"rank {1 - rank} of 2: rank {rank} has ended and did not meet the others"


@pytest.mark.processes
def test_no_rank_leaves_init_before_all_are_connected():
    """If it ended then, the connecting of the others would fail by an error of gloo's."""
    reports = run(TORCHRUN, "connect_late")
    assert min(report["left"] for report in reports) >= max(report["made"] for report in reports)


@pytest.mark.mpi
def test_the_example_of_the_readme_equals_dense_attention():
    pytest.importorskip("mpi4py")
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert block in (ROOT / "examples" / "attention.py").read_text()
    done = run_command([*MPIRUN, "-n", "4", *python(), "examples/attention.py"])
    errors = re.findall(r"worst difference to dense attention (\S+)", done.stdout)
    assert len(errors) == 4 and largest(map(float, errors)) < 1e-5, done.stdout  # float32


@pytest.mark.mpi
def test_an_mpirun_of_another_library_is_refused():
    pytest.importorskip("mpi4py")
    (report,) = run([], "report_the_error", PMI_RANK="0", PMI_SIZE="2", MPI_LOCALRANKID="0")
    assert "the launcher (mpich) started 2 ranks, but MPI sees 1" in report["error"]
    assert "Use the mpirun of that library" in report["error"]


@pytest.mark.processes
def test_a_rank_joins_again_after_a_restart_by_torchrun_and_after_close():
    reports = run([*TORCHRUN, "--max-restarts", "1"], "fail_and_join")
    assert_joined(reports, "torchrun", 2)


@pytest.mark.processes
def test_ranks_end_well_without_close():
    """Without our hook, torch aborts if a thread of gloo frees a tensor while Python exits."""
    assert len(run(TORCHRUN, "exit_without_close", new_interpreters=True)) == 2


def init_and_close(comm: Communicator) -> tuple[Launch, bool]:
    """In a process whose group is the program's: the launch, and whether a second one is equal."""
    os.environ["RANK"] = str(comm.rank)  # without WORLD_SIZE: Lightning leaves it so
    launch = init()
    launch.close()
    comm_contract.exchange(comm)
    return launch, init() == launch


@pytest.mark.processes
def test_a_group_of_the_program_is_described_and_not_closed():
    for rank, (launch, second_is_equal) in enumerate(run_processes(2, init_and_close)):
        assert (launch.rank, launch.world_size, launch.launcher) == (rank, 2, "environment")
        assert (launch.local_rank, launch.local_size, launch.backend) == (rank, 2, "gloo")
        assert second_is_equal


def close_connections_of_rank_0(comm: Communicator, default_device: str) -> None:
    """It lives on until rank 1, which waits for it, has an error."""
    store, held = dist.distributed_c10d._get_default_store(), (dist.group.WORLD,)
    if comm.rank == 0:
        with torch.device(default_device):
            ending._close_connections()
        store.wait(["heard"], timedelta(seconds=20))
    else:
        with pytest.raises(RuntimeError, match="rank 1 of 2: .* rank 0 failed: "):
            comm_contract.exchange(comm)
        store.set("heard", "")
    assert held


@pytest.mark.processes
@pytest.mark.parametrize("default_device", ("cpu", "meta"))
def test_a_failed_rank_is_heard_before_it_ends_though_torchs_functions_hold_its_group(
    default_device: str,
):
    """Arguments of torch.distributed.nn.functional, which torch.optim imports, default to it.

    "meta" stands for the GPU of a script that calls torch.set_default_device.
    """
    run_processes(2, close_connections_of_rank_0, default_device)


def fail_beside_a_fork(comm: Communicator) -> None:
    """Rank 0 fails. A worker of its DataLoader, say, has copies of its connections."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if comm.rank == 0:
        fork = multiprocessing.get_context("fork").Process
        fork(target=time.sleep, args=(60,), daemon=True).start()
        with mock.patch.object(sys, "last_value", RuntimeError("a fault"), create=True):
            ending._tell_peers(Board(store), 0, 2)
        store.wait(["heard"], timedelta(seconds=20))
    else:
        with pytest.raises(RuntimeError):
            dist.barrier()  # of torch itself: no watch of ours ends it
        store.set("heard", "")


@pytest.mark.processes
def test_a_failed_rank_is_heard_though_a_fork_keeps_its_connections_open():
    run_processes(2, fail_beside_a_fork)
