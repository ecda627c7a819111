"""The topology that "auto" uses in a real job: named, or measured at the first attention call."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dense import dense_attention
from tests.helpers import run_mpi, run_processes, run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster import measure
from wf_backends.cluster.discover import JobTopology
from wf_backends.cluster.presets import one_host
from wf_backends.cluster.topology import Topology
from wf_backends.comm import Communicator
from wf_backends.schedule.mask import make_mask

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")


def attend(sp: SequenceParallel) -> float:
    """The largest error of a causal call with 8 heads, against dense attention in float64."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 8, 8, generator=random, dtype=torch.float64) for _ in range(3))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), causal=True))
    expected = dense_attention(q, k, v, make_mask(causal=True), 8**-0.5)
    return (out - expected).abs().max().item()


class Warnings(logging.Handler):
    """Collects messages of warning level or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class Job:
    """What a rank saw of a new SequenceParallel in two attention calls."""

    topology: Topology
    warnings: list[str]
    seconds: float
    """CPU time of the first call: other tests may share the cores with this one."""
    error: float
    second_error: float
    keeps_random_state: bool


def run_job(group: Any, hosts: list[str], folder: str, config: dict) -> Job:
    """Attend twice, on a rank of the host `hosts[rank]`, with the cache in `folder`."""
    rank = group.rank
    socket.gethostname = lambda: hosts[rank]  # for good: this process ends with the test
    measure.NO_REPEATS_AFTER_S = 0.5  # the measured values need not be exact here
    os.environ["XDG_CACHE_HOME"] = folder
    handler, log = Warnings(), logging.getLogger("wf_backends.cluster.discover")
    log.addHandler(handler)
    random_state = torch.random.get_rng_state()
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), group)
    start = time.process_time()
    error = attend(sp)
    seconds = time.process_time() - start
    second_error = attend(sp)
    log.removeHandler(handler)
    return Job(
        sp._attention.topology._topology or one_host(1),
        handler.messages,
        seconds,
        error,
        second_error,
        torch.equal(random_state, torch.random.get_rng_state()),
    )


def run_two_jobs(group: Any, hosts: list[str], folder: str, config: dict) -> tuple[Job, Job]:
    return run_job(group, hosts, folder, config), run_job(group, hosts, folder, config)


@pytest.mark.parametrize("hosts", (["a", "b"], ["a", "a", "b", "b"]), ids=str)
def test_two_hosts_are_measured_at_the_first_call(hosts: list[str], tmp_path: Path) -> None:
    """The second job reads the topology that rank 0 of the first has kept."""
    config = {"sequence_parallel_size": len(hosts)}
    results = run_processes(len(hosts), run_two_jobs, hosts, str(tmp_path), config)
    job_of_rank_0, _ = results[0]
    topology = job_of_rank_0.topology
    assert (topology.hosts, topology.size) == (2, len(hosts))
    assert topology.name == "measured on a and 1 more"
    (kept,) = (tmp_path / "wallfacer").iterdir()
    assert json.loads(kept.read_text()) == topology.to_dict()
    (warning,) = job_of_rank_0.warnings
    assert str(kept) in warning and "measured 2 hosts x" in warning
    for rank, (first, second) in enumerate(results):
        assert first.topology == second.topology == topology
        assert second.warnings == [] and (rank == 0 or first.warnings == [])
        assert second.seconds < first.seconds < 10
        assert first.keeps_random_state
        for job in (first, second):
            assert job.error < 1e-10 and job.second_error < 1e-10


@pytest.mark.parametrize(
    ("hosts", "options"),
    (
        (["a", "a"], {}),
        (["a", "b"], {"route": "ring"}),
        (["a", "b"], {"strategy": "lss"}),
        (["a", "a"], {"topology": "one-host"}),
        (["a", "b"], {"sequence_parallel_size": 1}),
    ),
    ids=str,
)
def test_nothing_is_measured_if_no_choice_depends_on_it(
    hosts: list[str], options: dict, tmp_path: Path
) -> None:
    config = {"sequence_parallel_size": len(hosts)} | options
    for job in run_processes(len(hosts), run_job, hosts, str(tmp_path), config):
        assert job.error < 1e-10 and job.warnings == [] and job.topology.name == "one-host"
    assert list(tmp_path.iterdir()) == []


def test_one_host_is_measured_if_the_config_says_so(tmp_path: Path) -> None:
    config = {"sequence_parallel_size": 2, "topology": "measure"}
    jobs = run_processes(2, run_job, ["a", "a"], str(tmp_path), config)
    assert {job.topology.name for job in jobs} == {"measured on a"}
    assert "measured 1 hosts x 2 ranks" in jobs[0].warnings[0]


@pytest.mark.parametrize(("device", "name"), (("cpu", "one-host"), ("cuda", "measured")))
def test_one_host_is_measured_if_its_ranks_have_gpus(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: measuring returns a constant."""
    measured = replace(one_host(2), name="measured", memory_bytes=1e9)
    monkeypatch.setattr("wf_backends.cluster.discover.measure_topology", lambda *_: measured)

    def find_topology(comm: Communicator) -> str:
        return JobTopology(comm, None, None, tmp_path).find(torch.device(device)).name

    assert run_threads(2, find_topology) == [name] * 2
    assert len(list(tmp_path.iterdir())) == (1 if device == "cuda" else 0)


def test_groups_side_by_side_are_measured_separately(tmp_path: Path) -> None:
    """Two sequences on 4 ranks, measured at the same time: they share the NICs of their hosts."""
    config = {"sequence_parallel_size": 2}
    jobs = run_processes(4, run_job, ["a", "b", "a", "c"], str(tmp_path), config)
    assert [job.topology.name for job in jobs] == 4 * ["measured on a and 1 more"]
    assert jobs[0].topology == jobs[1].topology and jobs[2].topology == jobs[3].topology
    assert len(list((tmp_path / "wallfacer").iterdir())) == 2
    assert all(job.error < 1e-10 for job in jobs)


@pytest.mark.parametrize("hosts", (["a", "a", "b"], ["a", "b", "a", "b"]), ids=str)
def test_uneven_or_mixed_hosts_count_as_hosts_of_one_rank(hosts: list[str], tmp_path: Path) -> None:
    config = {"sequence_parallel_size": len(hosts)}
    jobs = run_processes(len(hosts), run_job, hosts, str(tmp_path), config)
    for job in jobs:
        assert (job.topology.hosts, job.topology.ranks_per_host) == (len(hosts), 1)
        assert job.topology == jobs[0].topology and job.error < 1e-10
    assert "taken as hosts of one rank each" in jobs[0].warnings[0]


def test_a_cache_that_cannot_be_written_is_reported_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wallfacer").write_text("a file in place of the folder")
    jobs = run_processes(2, run_job, ["a", "b"], str(tmp_path), {"sequence_parallel_size": 2})
    assert all(job.error < 1e-10 for job in jobs)
    assert "not kept (" in jobs[0].warnings[0]


def run_jobs_and_spoil_the_cache(
    group: Any, hosts: list[str], folder: str, config: dict
) -> tuple[Job, Job]:
    first = run_job(group, hosts, folder, config)
    if group.rank == 0:
        (kept,) = Path(folder, "wallfacer").iterdir()
        kept.write_text('{"name": "half a fi')
    return first, run_job(group, hosts, folder, config)


def test_a_topology_whose_file_is_spoilt_is_measured_again(tmp_path: Path) -> None:
    hosts, config = ["a", "b"], {"sequence_parallel_size": 2}
    results = run_processes(2, run_jobs_and_spoil_the_cache, hosts, str(tmp_path), config)
    assert "measured" in results[0][1].warnings[0]
    assert all(second.error < 1e-10 for _, second in results)


def error_of_a_job(group: Any, hosts: list[str], config: dict) -> str:
    socket.gethostname = lambda: hosts[group.rank]
    with pytest.raises(ValueError) as caught:
        attend(SequenceParallel(SequenceParallelConfig.from_dict(config), group))
    return str(caught.value)


def test_a_topology_that_contradicts_the_job_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(one_host(2).to_dict() | {"memory_gib": 8}))
    config = {"sequence_parallel_size": 2, "topology": str(path)}
    for error in run_processes(2, error_of_a_job, ["a", "b"], config):
        assert "contradicts the job: it has 1 hosts, the job 2: ['a', 'b']" in error
        assert '"topology": "measure"' in error
    config |= {"sequence_parallel_size": 3}
    for error in run_processes(3, error_of_a_job, ["a", "a", "b"], config):
        assert "pair.json: it has 2 ranks, but 3 share a sequence" in error


def attend_over_mpi(world: Any, folder: str) -> tuple[str, float, int]:
    """(name of the topology, largest error, files in the cache)."""
    measure.NO_REPEATS_AFTER_S = 0.5
    os.environ["XDG_CACHE_HOME"] = folder
    rank = world.rank
    socket.gethostname = lambda: "ab"[rank]
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), world)
    error = attend(sp)
    return sp._attention.topology.find(CPU).name, error, len(list(Path(folder).iterdir()))


@pytest.mark.mpi
def test_two_hosts_are_measured_over_mpi(tmp_path: Path) -> None:
    for name, error, num_files in run_mpi(2, attend_over_mpi, str(tmp_path)):
        assert name == "measured on a and 1 more" and error < 1e-10 and num_files == 1
