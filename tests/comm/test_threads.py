"""Threads as ranks: the contract, and what makes them stricter than a network."""

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


def test_first_error_is_raised_and_frees_every_waiting_rank():
    start = time.monotonic()
    with pytest.raises(KeyError, match="the real reason"):
        run_threads(4, fail_on_rank_2, timeout=30)
    assert time.monotonic() - start < 5


def test_abort_reaches_waiting_ranks_with_name_and_reason():
    world = World(2, timeout=30)
    pending = world.comm(0).post("hop 7", [], [(1, torch.empty(2))])
    world.abort(1, KeyError("the real reason"))
    world.abort(0, ValueError("a consequence"))
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
    unchanged = comm.post("hop 6", [(1, buffer)], [])
    unchanged.wait()  # NaN equals itself here
    pending = comm.post("hop 7", [(1, buffer)], [])
    buffer += 1
    buffer.zero_()
    with pytest.raises(RuntimeError, match=r"rank 0 changed a buffer .* to rank 1 in 'hop 7'"):
        pending.wait()


def test_a_sent_message_does_not_follow_its_buffer():
    world = World(2)
    buffer, landing = torch.ones(3), torch.empty(3)
    world.comm(0).post("hop", [(1, buffer)], []).wait()
    buffer.zero_()
    world.comm(1).post("hop", [], [(0, landing)]).wait()
    assert torch.equal(landing, torch.ones(3))


@pytest.mark.parametrize(
    ("sent", "landing", "words"),
    [
        (torch.ones(3), torch.empty(4), "sent 3 x torch.float32 to rank 0.* 4 x torch.float32"),
        (torch.ones(3), torch.ones(3).long(), "sent 3 x torch.float32 .* 3 x torch.int64"),
    ],
    ids=["size", "dtype"],
)
def test_mismatch_names_both_sides(sent, landing, words):
    world = World(2)
    world.comm(1).post("hop 7", [(0, sent)], [])
    pending = world.comm(0).post("hop 7", [], [(1, landing)])
    with pytest.raises(RuntimeError, match="'hop 7' rank 1 " + words):
        pending.wait()


def test_make_comm_without_a_launcher_is_one_rank():
    comm = make_comm()
    assert isinstance(comm, ThreadComm)
    assert (comm.rank, comm.size) == (0, 1)


def test_make_comm_refuses_what_is_no_group():
    with pytest.raises(ValueError, match=r"group must be .* got builtins\.int: 3"):
        make_comm(3)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_non_contiguous_buffers_are_our_own_mistake(way):
    messages = [(1, torch.ones(3, 2).t())]
    sends, recvs = (messages, []) if way == "send" else ([], messages)
    with pytest.raises(AssertionError, match="'hop 7'.*contiguous"):
        World(2).comm(0).post("hop 7", sends, recvs)


def test_a_message_to_oneself_is_our_own_mistake():
    with pytest.raises(AssertionError, match="'hop 7'.*itself"):
        World(2).comm(0).post("hop 7", [(0, torch.ones(1))], [])


def test_what_one_post_sends_another_must_receive_at_once():
    def apart(comm):
        x, y = torch.zeros(2), torch.zeros(2)
        if comm.rank == 0:
            comm.post("both", [(1, x), (1, y)], []).wait()
        else:
            comm.post("first", [], [(0, x)]).wait()
            comm.post("second", [], [(0, y)]).wait()

    with pytest.raises(RuntimeError, match="'second'"):
        run_threads(2, apart, timeout=5)
