"""Ranks that meet, come late, do not come or are there twice."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch.distributed as dist

from wf_backends.launch import job_group as launch
from wf_backends.launch import rendezvous
from wf_backends.launch.environment import JobProcess


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_another_program_is_named_in_time(set_environ, rank):
    """torch itself waits for ever for an answer of that program."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        set_environ(RANK=str(rank), WORLD_SIZE="2", **address)
        problem = ("could not listen at", "did not reach rank 0 at")[rank]
        with pytest.raises(RuntimeError, match=rf"rank {rank} of 2 .* {problem} 127.0.0.1:{port}"):
            launch.init(timeout=0.5)


@pytest.fixture
def ctrl_c_is_heard():
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_wait_for_other_ranks(set_environ, rank, ctrl_c_is_heard):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    set_environ(RANK=str(rank), WORLD_SIZE="2", **address)
    start = time.monotonic()
    ctrl_c = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.start()
        launch.init(timeout=8)
    assert time.monotonic() - start < 6


def test_a_rank_0_that_ends_while_others_are_awaited_is_named():
    stores_of_rank_0 = [dist.TCPStore("127.0.0.1", 0, is_master=True)]
    port = stores_of_rank_0[0].port
    store = dist.TCPStore("127.0.0.1", port)
    threading.Timer(0.5, stores_of_rank_0.clear).start()
    process = JobProcess("slurm", 1, 3, address="127.0.0.1", port=port)
    message = r"rank 1 of 3 \(slurm\) waited for all ranks, and rank 0, .* has ended"
    with pytest.raises(RuntimeError, match=message):
        rendezvous.meet(store, process, timeout=20)


def test_a_rank_0_that_gave_up_first_counts_as_one_that_did_not_come(monkeypatch):
    """Its store is gone when this rank asks it who is missing."""
    stores_of_rank_0 = [dist.TCPStore("127.0.0.1", 0, is_master=True)]
    port = stores_of_rank_0[0].port
    store = dist.TCPStore("127.0.0.1", port)

    def give_up_both(*_: Any) -> dist.Store:
        stores_of_rank_0.clear()
        raise dist.DistStoreError("wait timeout")

    monkeypatch.setattr(rendezvous, "_join_rank_0", give_up_both)
    process = JobProcess("slurm", 1, 3, address="127.0.0.1", port=port)
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 3 .* waited 20 s at .*: ranks \[0\] did not"
    ):
        rendezvous.meet(store, process, timeout=20)


def test_ranks_that_do_not_come_are_named(set_environ, monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECTS", 1)  # on a busy machine its own store takes long
    port = free_port()
    set_environ(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    message = rf"rank 0 of 3 \(environment\) waited 1 s at 127.0.0.1:{port}: ranks \[1, 2\]"
    with pytest.raises(RuntimeError, match=message):
        launch.init(timeout=1)


def test_a_rank_0_that_does_not_come_is_named(set_environ):
    set_environ(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    message = r"rank 1 of 2 \(environment\) did not reach rank 0 at 127.0.0.1:9 .* refused"
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with pytest.raises(RuntimeError, match=message):
        launch.init(timeout=1)
    assert set(threading.enumerate()) <= threads  # one inside of torch may abort Python's end


def test_a_rank_0_that_comes_late_is_awaited(set_environ):
    port = free_port()
    set_environ(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stores = list[dist.TCPStore]()

    def listen() -> None:
        stores.append(dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False))

    threading.Timer(0.5, listen).start()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .* waited 3 s at .*: ranks \[0\]"):
        launch.init(timeout=3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_rank_0_that_does_not_resolve_is_named(set_environ, rank):
    set_environ(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="no.invalid", MASTER_PORT="29500")
    message = (
        rf"rank {rank} of 2 .* within 0.5 s: {socket.gethostname()} knows no host 'no.invalid'"
    )
    with pytest.raises(RuntimeError, match=message):
        launch.init(timeout=0.5)


def test_ranks_meet_and_agree_whatever_number_of_restarts_their_agents_count():
    """torchrun's agent of a host counts only the failures of its own ranks."""
    store = dist.HashStore()

    def meet(rank: int, restart: int, timeout: float = 20.0) -> tuple[dist.Store, JobProcess]:
        process = JobProcess("torchrun", rank, 2, rank, 2, "here", 1, restart, agent_store=True)
        return rendezvous.meet(store, process, timeout)

    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come"):
        meet(0, 0, timeout=0.1)  # leaves its name of an attempt
    for attempt, restarts in enumerate([(0, 0), (1, 0), (1, 2)]):
        with ThreadPoolExecutor() as pool:
            other = pool.submit(meet, 1, restarts[1])
            time.sleep(0.05)  # rank 1 sees what is left from the attempt before
            mine, my_process = meet(0, restarts[0])
            mine.set("attempt", str(attempt))
            others, other_process = other.result()
        assert others.get("attempt").decode() == str(attempt)
        assert my_process.restart == other_process.restart == max(restarts)


def test_ranks_with_different_world_sizes_are_refused_on_all():
    """They would wait until the timeout, or in torch's own rendezvous."""
    store = dist.HashStore()

    def meet(rank: int, size: int) -> None:
        rendezvous.meet(store, JobProcess("environment", rank, size, 0, 1, "here", 1), timeout=20)

    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(meet, *rank_and_size) for rank_and_size in ((0, 2), (1, 4))]
        for rank, size in enumerate((2, 4)):
            message = rf"rank {rank} of {size} .* another WORLD_SIZE, it is 2 to 4"
            with pytest.raises(ValueError, match=message):
                ranks[rank].result()


@pytest.mark.parametrize("size", [2, 3])
def test_a_second_process_of_a_rank_is_refused_before_and_after_the_ranks_have_met(
    monkeypatch: pytest.MonkeyPatch, size: int
):
    """Of 2 ranks, both have met when it comes; of 3, one comes only after the refusal."""
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.05)
    store = dist.HashStore()

    def meet(rank: int, timeout: float = 60) -> None:
        process = JobProcess("environment", rank, size, 0, 1, "here", 29500)
        rendezvous.meet(store, process, timeout)

    with ThreadPoolExecutor() as pool:
        first = [pool.submit(meet, rank) for rank in (0, 1)]
        if size == 2:
            first[1].result()
        rank_1 = [first[1], pool.submit(meet, 1, 0.3 if size == 2 else 60)]
        wait(rank_1, return_when=FIRST_EXCEPTION)
        if size == 3:
            meet(2)
    errors = [str(rank.exception()) for rank in rank_1 if rank.exception()]
    message = "another process came to here:29500 as rank 1, too: give each process a RANK of"
    assert len(errors) == 1 and errors[0].startswith(message), errors
    first[0].result()
