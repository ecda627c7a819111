"""An mpi4py communicator as a communicator of ours: its contract under a real mpirun."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import comm_contract
from tests.helpers import run_mpi
from wf_backends.comm import make_comm, mpi
from wf_backends.comm.mpi import MpiComm

pytestmark = pytest.mark.mpi


def run_checks(world: Any) -> dict[str, object]:
    """All checks of this file that can run in the same processes."""
    comm = make_comm(world)
    with patch.object(mpi, "MAX_MESSAGE", 7):  # messages of 20 bytes, in parts
        comm_contract.exchange(MpiComm(world))
    return {
        "type": type(comm).__name__,
        "contract": comm_contract.run_all(comm),
        "message of the program": exchange_beside_a_message_of_the_program(world, comm),
        "too short": send_a_wrong_size(MpiComm(world), 3, 4),
        "too long": send_a_wrong_size(MpiComm(world), 4, 3),
        "null": refuse_null(comm),
        "missing": comm_contract.skip_a_message(MpiComm(world, timeout=0.5)),
    }


def exchange_beside_a_message_of_the_program(world: Any, comm: Any) -> object:
    """The message that the program received on its own communicator, sent before our exchange."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    request = world.isend("of the program", right)
    comm_contract.exchange(comm)
    received = world.recv(source=left)
    request.wait()
    return received


def send_a_wrong_size(comm: Any, sent: int, expected: int) -> str:
    """Rank 0 sends `sent` numbers, rank 1 expects `expected`: the error of a rank."""
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
    return run_mpi(request.param, run_checks)


@pytest.mark.parametrize("check", comm_contract.NAMES)
def test_contract(ranks, check):
    for facts in ranks:
        failures = facts["contract"]
        assert not failures, next(iter(failures.values()))


def test_an_mpi4py_communicator_becomes_an_mpi_comm(ranks):
    assert {facts["type"] for facts in ranks} == {"MpiComm"}


def test_missing_message_names_ranks_and_label(ranks):
    size = len(ranks)
    start = f"rank 0 of {size}: 'hop 7', the message from rank {size - 1} failed: "
    assert ranks[0]["missing"] == f"{start}it did not end within 0.5 s"


def test_the_receiver_reports_a_message_of_a_wrong_size(ranks):
    too_short, too_long = ranks[1]["too short"], ranks[1]["too long"]
    assert too_short.endswith("the message from rank 0 failed: it has 12 bytes, expected 16")
    assert "rank 1 of" in too_long and "from rank 0 failed: " in too_long


def test_a_message_of_the_program_is_not_taken_for_ours(ranks):
    assert all(facts["message of the program"] == "of the program" for facts in ranks)


def test_null_communicator_is_refused(ranks):
    assert all("intracommunicator of this process" in facts["null"] for facts in ranks)
