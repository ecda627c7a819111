"""Joining the ranks under real launchers, with no environment set by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import comm_contract
from tests.dense import largest
from tests.helpers import MPIRUN, ROOT, python, run_command, run_processes
from wf_backends.comm import Communicator
from wf_backends.launch import Launch, init

PROGRAM = ["-m", "tests.launch_program"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]


def run(
    launcher: list[str], program: str, fresh: bool = False, **environ: str
) -> list[dict[str, Any]]:
    """What each rank of tests/launch_program.py reported, by rank.

    Args:
        fresh: whether each rank is an interpreter of its own, and no fork.
    """
    start = [sys.executable] if fresh else python()
    with TemporaryDirectory() as folder:
        command = [*launcher, *start, *PROGRAM, folder, program]
        done = run_command(command, timeout=240, environ=environ)
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert done.returncode == 0, done.stdout
    return sorted(reports, key=lambda found: found.get("rank", 0))


def check_ranks(reports: list[dict[str, Any]], launcher: str, size: int) -> None:
    """All ranks of one host agree, and found every fact."""
    assert [found["rank"] for found in reports] == list(range(size))
    assert sorted(found["local_rank"] for found in reports) == list(range(size))
    for found in reports:
        sizes = found["world_size"], found["local_size"]
        assert (found["launcher"], *sizes) == (launcher, size, size)
        assert found["sum of ranks"] == size * (size - 1) // 2
        assert (found["backend"], found["device"], found["comm"]) == ("gloo", "cpu", "GroupComm")
        assert found["again"], "a second init() must report the same"
        assert f"rank {found['rank']} of {size}" in found["text"] and launcher in found["text"]
        check_environ(found)


def check_environ(found: dict[str, Any]) -> None:
    """The variables that deepspeed.init_distributed and accelerate read."""
    environ = found["environ"]
    names = {
        "RANK": "rank",
        "WORLD_SIZE": "world_size",
        "LOCAL_RANK": "local_rank",
        "LOCAL_WORLD_SIZE": "local_size",
    }
    assert all(environ[name] == str(found[fact]) for name, fact in names.items())
    assert environ["MASTER_ADDR"] and int(environ["MASTER_PORT"]) > 0


@pytest.mark.mpi
def test_mpirun_and_then_an_unknown_launcher_through_mpi():
    pytest.importorskip("mpi4py")
    reports = run([*MPIRUN, "-n", "2"], "twice", fresh=True)
    check_ranks(reports, "openmpi", 2)
    assert all(found["left"] for found in reports), "close() must undo init()"
    check_ranks([found["hidden"] for found in reports], "mpi4py", 2)


@pytest.mark.mpi
def test_mpirun_with_more_ranks_than_cores():
    pytest.importorskip("mpi4py")
    reports = run([*MPIRUN, "-n", "4"], "join")
    check_ranks(reports, "openmpi", 4)
    assert {found["environ"]["MASTER_ADDR"] for found in reports} == {"127.0.0.1"}


@pytest.mark.mpi
def test_the_block_of_the_readme_gives_what_dense_attention_gives():
    pytest.importorskip("mpi4py")
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert block in (ROOT / "examples" / "attention.py").read_text()
    done = run_command([*MPIRUN, "-n", "4", sys.executable, "examples/attention.py"])
    found = re.findall(r"worst difference to dense attention (\S+)", done.stdout)
    assert len(found) == 4 and largest(map(float, found)) < 1e-5, done.stdout


@pytest.mark.mpi
def test_an_mpirun_of_another_library_is_refused():
    pytest.importorskip("mpi4py")
    [found] = run([], "refused", PMI_RANK="0", PMI_SIZE="2", MPI_LOCALRANKID="0")
    assert "the launcher (mpich) started 2 ranks, but MPI sees 1" in found["error"]
    assert "Use the mpirun of that library" in found["error"]


@pytest.mark.processes
def test_torchrun_joins_again_after_a_failure_and_after_leaving():
    reports = run([*TORCHRUN, "--max-restarts", "1"], "fail_first")
    check_ranks(reports, "torchrun", 2)


@pytest.mark.processes
def test_ranks_end_well_though_they_close_nothing():
    """Torch aborts where a thread of gloo frees a tensor while Python ends."""
    assert len(run(TORCHRUN, "leave", fresh=True)) == 2


def describe(comm: Communicator) -> tuple[Launch, bool]:
    """Somebody else initialised torch.distributed."""
    launch = init()
    launch.close()
    comm_contract.exchange(comm)
    return launch, init() == launch


@pytest.mark.processes
def test_a_group_that_somebody_else_made_is_described_and_left_alone():
    for rank, (launch, again) in enumerate(run_processes(2, describe)):
        assert (launch.rank, launch.world_size, launch.launcher) == (rank, 2, "environment")
        assert (launch.local_rank, launch.local_size, launch.backend) == (rank, 2, "gloo")
        assert again
