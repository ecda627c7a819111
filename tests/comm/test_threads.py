"""Threads as ranks: the contract of a communicator, and checks that a network does not make."""

from __future__ import annotations

import time

import pytest
import torch

from tests import comm_contract
from tests.helpers import run_threads
from wf_backends.comm import Communicator, ThreadComm, World, make_comm


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", comm_contract.CHECKS, ids=comm_contract.NAMES)
def test_contract(check, size):
    run_threads(size, check, timeout=10)


@pytest.mark.parametrize("size", [2, 4])
def test_missing_message_names_ranks_and_label(size):
    message = run_threads(size, comm_contract.skip_a_message)[0]
    assert f"rank 0 waits for a message of rank {size - 1} in 'hop 7'" in message
    assert "ended without sending it" in message


def test_timeout_names_ranks_and_label():
    comm = World(2, timeout=0.05).comm(0)
    pending = comm.post("hop 7", [], [(1, torch.empty(2))])
    with pytest.raises(RuntimeError, match=r"rank 0 .* rank 1 in 'hop 7', but none .* 0\.05 s"):
        pending.wait()


def fail_on_rank_2(comm: Communicator) -> str:
    if comm.rank == 2:
        raise KeyError("the real reason")
    try:
        comm.post("hop 7", [], [(1 - comm.rank if comm.rank < 2 else 0, torch.empty(2))]).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_error_of_one_rank_ends_the_waits_of_all():
    start = time.monotonic()
    with pytest.raises(KeyError, match="the real reason"):
        run_threads(4, fail_on_rank_2, timeout=30)
    assert time.monotonic() - start < 5


def test_a_waiting_rank_raises_the_error_of_the_first_rank_that_failed():
    world = World(2, timeout=30)
    pending = world.comm(0).post("hop 7", [], [(1, torch.empty(2))])
    world.leave(1, KeyError("the real reason"))
    world.leave(0, ValueError("a consequence"))
    with pytest.raises(RuntimeError, match=r"'hop 7', but rank 1 failed.*the real reason"):
        pending.wait()


def test_a_receive_read_too_early_is_nan():
    world = World(2)
    buffer = torch.ones(3, dtype=torch.bfloat16)
    world.comm(1).post("hop", [(0, torch.ones(3, dtype=torch.bfloat16))], [])
    pending = world.comm(0).post("hop", [], [(1, buffer)])
    assert buffer.isnan().all()
    pending.wait()
    assert torch.equal(buffer, torch.ones(3, dtype=torch.bfloat16))


def test_a_send_buffer_changed_before_the_wait_is_reported():
    comm = World(2).comm(0)
    buffer = torch.full((3,), torch.nan)
    comm.post("hop 6", [(1, buffer)], []).wait()  # unchanged: NaN counts as equal to itself
    pending = comm.post("hop 7", [(1, buffer)], [])
    buffer.zero_()
    with pytest.raises(RuntimeError, match=r"rank 0 changed a buffer .* to rank 1 in 'hop 7'"):
        pending.wait()


def test_a_change_of_the_send_buffer_after_the_wait_does_not_change_the_message():
    world = World(2)
    buffer, received = torch.ones(3), torch.empty(3)
    world.comm(0).post("hop", [(1, buffer)], []).wait()
    buffer.zero_()
    world.comm(1).post("hop", [], [(0, received)]).wait()
    assert torch.equal(received, torch.ones(3))


@pytest.mark.parametrize(
    ("sent", "buffer", "message"),
    [
        (torch.ones(3), torch.empty(4), "sent 3 x torch.float32 to rank 0.* 4 x torch.float32"),
        (torch.ones(3), torch.ones(3).long(), "sent 3 x torch.float32 .* 3 x torch.int64"),
    ],
    ids=["size", "dtype"],
)
def test_an_error_about_a_wrong_size_or_dtype_names_both_sides(sent, buffer, message):
    world = World(2)
    world.comm(1).post("hop 7", [(0, sent)], [])
    pending = world.comm(0).post("hop 7", [], [(1, buffer)])
    with pytest.raises(RuntimeError, match="'hop 7' rank 1 " + message):
        pending.wait()


def test_make_comm_without_a_launcher_is_one_rank():
    comm = make_comm()
    assert isinstance(comm, ThreadComm)
    assert (comm.rank, comm.size) == (0, 1)


def test_make_comm_refuses_an_integer():
    with pytest.raises(ValueError, match=r"group must be .* got builtins\.int: 3"):
        make_comm(3)


@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_non_contiguous_buffer_fails_an_assertion(side):
    messages = [(1, torch.ones(3, 2).t())]
    sends, recvs = (messages, []) if side == "send" else ([], messages)
    with pytest.raises(AssertionError, match="'hop 7'.*contiguous"):
        World(2).comm(0).post("hop 7", sends, recvs)


def test_a_message_to_itself_fails_an_assertion():
    with pytest.raises(AssertionError, match="'hop 7'.*itself"):
        World(2).comm(0).post("hop 7", [(0, torch.ones(1))], [])


def test_messages_of_one_post_must_be_received_by_one_post():
    def receive_in_two_posts(comm):
        x, y = torch.zeros(2), torch.zeros(2)
        if comm.rank == 0:
            comm.post("both", [(1, x), (1, y)], []).wait()
        else:
            comm.post("first", [], [(0, x)]).wait()
            comm.post("second", [], [(0, y)]).wait()

    with pytest.raises(RuntimeError, match="'second'"):
        run_threads(2, receive_in_two_posts, timeout=5)
