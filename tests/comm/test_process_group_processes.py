"""A gloo process group as a communicator: its contract, and the errors when a peer is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from tests import comm_contract
from tests.helpers import run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, Pending, job_board, make_comm
from wf_backends.comm.process_group import GroupComm, own_group, timeout_of
from wf_backends.comm.protocol import Staged

pytestmark = pytest.mark.processes


def run_checks(comm: Communicator) -> dict[str, object]:
    """All checks of this file that can run in the same processes."""
    facts: dict[str, object] = {
        "type": type(comm).__name__,
        "on_host": comm.on_host,
        "contract": comm_contract.run_all(comm),
        "device": refuse_device(comm),
        "missing, timeout of the group": wait_in_vain(comm, timedelta(seconds=0.5), None),
        "missing, timeout of the communicator": wait_in_vain(comm, timedelta(seconds=60), 0.5),
    }
    if comm.size == 4:
        assert isinstance(comm, GroupComm)
        facts |= {
            "staged": send_around_a_ring(comm, partial(Staged, comm.post)),
            "batched": send_around_a_ring(comm, comm._post_batch),
            "subgroup": run_contract_in_subgroups(comm),
            "own group": make_own_group(comm.group),
            "timeouts": [timeouts_of_waits(comm.group, batched) for batched in (False, True)],
            "timeout of a new group": GroupComm(dist.new_group()).wait_args,
        }
    return facts


def make_own_group(world: dist.ProcessGroup) -> tuple[bool, bool]:
    """Whether `own_group()` is another group than the world, and whether its timeout is equal."""
    group = own_group()
    assert group is not None
    return group is not world, timeout_of(group) == timeout_of(world) is not None


class Work:
    """A work that notes the arguments of its `wait`."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.wait_args = work, ()

    def wait(self, *args) -> None:
        self.wait_args = args
        self.work.wait(*args)


def timeouts_of_waits(group: dist.ProcessGroup, batched: bool) -> list[tuple[timedelta, ...]]:
    """What the waits of a communicator with a timeout of 30 s pass to torch's works."""
    comm = GroupComm(group, timeout=30.0)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    post = comm._post_batch if batched else comm._post_each
    pending = post("ring", [(right, torch.ones(1))], [(left, torch.empty(1))])
    works = [Work(work) for *_, work in pending.works]
    pending.works = [("message", left, work) for work in works]
    pending.wait()
    return [work.wait_args for work in works]


def wait_in_vain(comm: Communicator, group_timeout: timedelta, timeout: float | None) -> str:
    """The error of rank 0, which waits for a message that is never sent."""
    error = comm_contract.skip_a_message(make_comm(dist.new_group(timeout=group_timeout), timeout))
    comm_contract.exchange(comm)  # no rank ends before the timeout of rank 0
    return error


def send_around_a_ring(comm: Communicator, post: Callable[..., Pending]) -> float:
    """The number that the left neighbour sent by `post`.

    `post` is one of the two paths of CUDA tensors, run here with CPU tensors.
    """
    received = torch.empty(())
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    post("ring", [(right, torch.tensor(float(comm.rank)))], [(left, received)]).wait()
    return received.item()


def run_contract_in_subgroups(comm: Communicator) -> dict[str, str]:
    """Groups of ranks [3, 1] and [0, 2]: peers are ranks in the group."""
    odd, even = dist.new_group([3, 1], sort_ranks=False), dist.new_group([0, 2])
    own, other = (odd, even) if comm.rank % 2 else (even, odd)
    subgroup = make_comm(own)
    assert isinstance(subgroup, GroupComm)
    assert subgroup.rank == {3: 0, 1: 1, 0: 0, 2: 1}[comm.rank]
    with pytest.raises(ValueError, match=f"does not hold this process .global rank {comm.rank}"):
        make_comm(other)
    return comm_contract.run_all(subgroup)


def refuse_device(comm: Communicator) -> str:
    try:
        comm.post("hop", [(1 - comm.rank % 2, torch.ones(1, device="meta"))], [])
    except ValueError as error:
        return str(error)
    return "no error"


def exit_between_two_hops(comm: Communicator) -> None:
    """Rank 1 exits after a first hop: rank 0 waits for it up to 60 s, and rank 2 for rank 0."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.post("hop 6", [(left, torch.ones(2))], [(right, torch.empty(2))]).wait()
    if comm.rank == 1:
        os._exit(7)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        comm.post("hop 7", [], [(right, torch.empty(2))]).wait()
    seconds = time.monotonic() - start
    assert seconds < 10  # not in a `finally`, where the traceback would also have the error
    board = job_board()
    assert board is not None
    raise RuntimeError(f"{error.value}; {board.read('report', 0)}")


@cache
def results_of(size: int) -> list[dict[str, object]]:
    return run_processes(size, run_checks)


@pytest.fixture(params=[2, 4])
def ranks(request):
    return results_of(request.param)


@pytest.fixture
def four_ranks():
    return results_of(4)


@pytest.mark.parametrize("check", comm_contract.NAMES)
def test_contract(ranks, check):
    for facts in ranks:
        failures = facts["contract"]
        assert not failures, next(iter(failures.values()))


def test_default_group_becomes_a_group_comm(ranks):
    assert {(facts["type"], facts["on_host"]) for facts in ranks} == {("GroupComm", True)}


def test_missing_message_names_ranks_and_label(ranks):
    size = len(ranks)
    for source in ("group", "communicator"):
        error = ranks[0][f"missing, timeout of the {source}"]
        assert error.startswith(
            f"rank 0 of {size}: 'hop 7', the message from rank {size - 1} failed: "
        )
        assert "Timed out" in error


def test_tensors_of_a_device_without_a_backend_are_refused(ranks):
    for facts in ranks:
        assert "cannot move meta tensors, which 'hop' sends" in facts["device"]


def test_subgroups_keep_the_contract(four_ranks):
    assert all(facts["subgroup"] == {} for facts in four_ranks)


@pytest.mark.parametrize("path", ["staged", "batched"])
def test_messages_on_the_paths_of_cuda_tensors_arrive(four_ranks, path):
    assert [facts[path] for facts in four_ranks] == [3.0, 0.0, 1.0, 2.0]


def test_own_group_is_a_new_group_with_the_same_timeout(four_ranks):
    assert all(facts["own group"] == (True, True) for facts in four_ranks)


def test_a_timeout_is_for_waits_of_gloo_alone(four_ranks):
    """With a timeout, the wait of NCCL would hold the host until the messages have arrived."""
    for facts in four_ranks:
        assert facts["timeouts"] == [[(timedelta(seconds=30),)] * 2, [()] * 2]


def test_a_group_made_without_a_timeout_waits_as_long_as_the_default_group(four_ranks):
    """torch gives it 30 minutes."""
    assert {facts["timeout of a new group"] for facts in four_ranks} == {(timedelta(seconds=60),)}


def test_without_a_job_there_is_no_own_group():
    assert own_group() is None


def test_a_dead_peer_is_named_and_those_that_wait_for_others_answer():
    with pytest.raises(RuntimeError, match="rank 1: ended with exit code 7") as error:
        run_processes(3, exit_between_two_hops, group_timeout=60)
    assert "rank 0 of 3: 'hop 7', the message from rank 1 failed: " in str(error.value)
    assert "rank 2 of 3: 'hop 7', the message from rank 0 failed: " in str(error.value)
    assert "fault report: ranks [0, 2] answered, ranks [1] did not" in str(error.value)


def attend_after_destroying_the_group(comm: Communicator) -> list[str]:
    """The errors of attention: without a group, and with a new one in place of the destroyed."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
    x, errors = torch.ones(1, 8, 2, 8), list[str]()
    sp.attention(x, x, x)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError) as error:
        sp.attention(x, x, x)
    errors.append(str(error.value))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError) as error:
        sp.attention(x, x, x)
    return [*errors, str(error.value)]


def test_attention_names_a_group_that_was_destroyed():
    for rank, errors in enumerate(run_processes(2, attend_after_destroying_the_group)):
        start = f"rank {rank} of 2: the process group was destroyed"
        assert all(error.startswith(start) for error in errors)
