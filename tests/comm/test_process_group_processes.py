"""A gloo process group as a communicator: the contract, and what happens when a peer is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import comm_contract
from tests.helpers import run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, Pending, make_comm
from wf_backends.comm.process_group import GroupComm, own_group, timeout_of
from wf_backends.comm.staging import Staged

pytestmark = pytest.mark.processes


def everything(comm: Communicator) -> dict[str, object]:
    """All that can share one start of the processes."""
    facts: dict[str, object] = {
        "type": type(comm).__name__,
        "on_host": comm.on_host,
        "contract": comm_contract.run_all(comm),
        "device": refuse_device(comm),
        "missing": missing(comm, timedelta(seconds=0.5), None),
        "missing soon": missing(comm, timedelta(seconds=60), 0.5),
    }
    if comm.size == 4:
        assert isinstance(comm, GroupComm)
        facts |= {
            "staged": ring(comm, partial(Staged, comm.post)),
            "batched": ring(comm, comm._post_batch),
            "subgroup": subgroup(comm),
            "own": own(comm.group),
        }
    return facts


def own(world: dist.ProcessGroup) -> tuple[bool, bool]:
    """Whether a group of one's own is another one, and whether it waits as long."""
    group = own_group()
    assert group is not None
    return group is not world, timeout_of(group) == timeout_of(world) is not None


def missing(comm: Communicator, group_timeout: timedelta, timeout: float | None) -> str:
    """A silent peer and a short timeout; nobody leaves before rank 0 has said so."""
    impatient = make_comm(dist.new_group(timeout=group_timeout), timeout)
    words = comm_contract.skip_a_message(impatient)
    comm_contract.exchange(comm)
    return words


def ring(comm: Communicator, post: Callable[..., Pending]) -> float:
    """What the left neighbour sent by `post`: the ways of CUDA tensors, tried with CPU tensors."""
    landing = torch.empty(())
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    post("ring", [(right, torch.tensor(float(comm.rank)))], [(left, landing)]).wait()
    return landing.item()


def subgroup(comm: Communicator) -> dict[str, str]:
    """Ranks 3, 1 and 0, 2 as groups of their own: peers are ranks in the group."""
    groups = [dist.new_group([3, 1], sort_ranks=False), dist.new_group([0, 2])]
    mine = make_comm(groups[1 - comm.rank % 2])
    assert isinstance(mine, GroupComm)
    assert mine.rank == {3: 0, 1: 1, 0: 0, 2: 1}[comm.rank]
    with pytest.raises(ValueError, match=f"does not hold this process .global rank {comm.rank}"):
        make_comm(groups[comm.rank % 2])
    return comm_contract.run_all(mine)


def refuse_device(comm: Communicator) -> str:
    try:
        comm.post("hop", [(1 - comm.rank % 2, torch.ones(1, device="meta"))], [])
    except ValueError as error:
        return str(error)
    return "no error"


def die(comm: Communicator) -> str:
    """Rank 1 dies before it sends again; rank 0 must hear of it long before the timeout."""
    other = 1 - comm.rank
    comm.post("hop 6", [(other, torch.ones(2))], [(other, torch.empty(2))]).wait()  # both are there
    if comm.rank == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        comm.post("hop 7", [(1, torch.ones(2))], [(1, torch.empty(2))]).wait()
    except RuntimeError as error:
        assert time.monotonic() - start < 10
        return str(error)
    return "no error"


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_processes(request.param, everything)


@pytest.mark.parametrize("check", comm_contract.NAMES)
def test_contract(ranks, check):
    for facts in ranks:
        failures = facts["contract"]
        assert not failures, next(iter(failures.values()))


def test_default_group_becomes_a_group_comm(ranks):
    assert {(facts["type"], facts["on_host"]) for facts in ranks} == {("GroupComm", True)}


def test_missing_message_names_ranks_and_label(ranks):
    size = len(ranks)
    words = f"rank 0 of {size}: 'hop 7', the message from rank {size - 1} failed: "
    for found in (ranks[0]["missing"], ranks[0]["missing soon"]):
        assert found.startswith(words)
        assert "Timed out" in found


def test_a_device_the_group_cannot_serve_is_refused(ranks):
    for facts in ranks:
        assert "cannot move meta tensors, which 'hop' sends" in facts["device"]


def test_subgroups_and_the_ways_of_cuda_tensors(ranks):
    if len(ranks) == 4:
        assert all(facts["subgroup"] == {} for facts in ranks)
        assert [facts["staged"] for facts in ranks] == [3.0, 0.0, 1.0, 2.0]
        assert [facts["batched"] for facts in ranks] == [3.0, 0.0, 1.0, 2.0]


def test_a_group_of_ones_own_waits_as_long(ranks):
    if len(ranks) == 4:
        assert all(facts["own"] == (True, True) for facts in ranks)


def test_no_job_has_no_group_of_its_own():
    assert own_group() is None


def test_a_dead_peer_is_named():
    with pytest.raises(RuntimeError, match="rank 1: ended with exit code 7") as error:
        run_processes(2, die_and_tell, group_timeout=60)
    assert "rank 0 of 2: 'hop 7', the message from rank 1 failed: " in str(error.value)


def outlive_its_group(comm: Communicator) -> list[str]:
    """What attention says of a group that was destroyed, and where there is another one since."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
    x, told = torch.ones(1, 8, 2, 8), list[str]()
    sp.attention(x, x, x)
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            sp.attention(x, x, x)
        told.append(str(error.value))
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return told


def test_a_group_that_was_destroyed_is_named():
    for rank, told in enumerate(run_processes(2, outlive_its_group)):
        says = f"rank {rank} of 2: the process group was destroyed"
        assert all(error.startswith(says) for error in told)


def die_and_tell(comm: Communicator) -> None:
    raise AssertionError(die(comm))
