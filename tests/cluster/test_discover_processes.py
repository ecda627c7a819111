"""What "auto" goes by in a real job: named, or measured at first use, and the same everywhere."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import replace
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
    """The error of a causal call with 8 heads in float64."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 8, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), causal=True))
    right = dense_attention(q, k, v, make_mask(causal=True), 8**-0.5)
    return (out - right).abs().max().item()


class Lines(logging.Handler):
    """What was logged at warning level or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def use(group: Any, hosts: list[str], folder: str, words: dict) -> tuple[Topology, list[str], dict]:
    """Attend on `hosts` by `words` alone: (topology, what was logged, times and errors)."""
    rank = group.rank
    socket.gethostname = lambda: hosts[rank]  # this process ends with the test
    measure.NO_REPEATS_AFTER_S = 0.5  # what is measured is told, not how well
    os.environ["XDG_CACHE_HOME"] = folder
    handler, log = Lines(), logging.getLogger("wf_backends.cluster.discover")
    log.addHandler(handler)
    before = torch.random.get_rng_state()
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), group)
    start = time.process_time()  # of a core: other tests may run beside this one
    error = attend(sp)
    facts = {"seconds": time.process_time() - start, "error": error, "again": attend(sp)}
    facts["random state kept"] = torch.equal(before, torch.random.get_rng_state())
    topology = sp._attention.topology
    log.removeHandler(handler)
    return topology._topology or one_host(1), handler.lines, facts


def use_twice(group: Any, hosts: list[str], folder: str, words: dict) -> tuple[Any, Any]:
    return use(group, hosts, folder, words), use(group, hosts, folder, words)


@pytest.mark.parametrize("hosts", (["a", "b"], ["a", "a", "b", "b"]), ids=str)
def test_several_hosts_are_measured_at_first_use(hosts: list[str], tmp_path: Path) -> None:
    words = {"sequence_parallel_size": len(hosts)}
    results = run_processes(len(hosts), use_twice, hosts, str(tmp_path), words)
    (topology, lines, _), _ = results[0]
    assert (topology.hosts, topology.size) == (2, len(hosts))
    assert topology.name == "measured on a and 1 more"
    (kept,) = (tmp_path / "wallfacer").iterdir()
    assert json.loads(kept.read_text()) == topology.to_dict()
    assert len(lines) == 1 and str(kept) in lines[0] and "measured 2 hosts x" in lines[0]
    for rank, (first, second) in enumerate(results):
        assert first[0] == second[0] == topology
        assert second[1] == [] and (rank == 0 or first[1] == [])
        assert first[2]["seconds"] < 10 and second[2]["seconds"] < first[2]["seconds"]
        assert all(one[2]["error"] < 1e-10 and one[2]["again"] < 1e-10 for one in (first, second))
        assert first[2]["random state kept"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    (
        (["a", "a"], {}),
        (["a", "b"], {"route": "ring"}),
        (["a", "b"], {"strategy": "lss"}),
        (["a", "a"], {"topology": "one-host"}),
        (["a", "b"], {"sequence_parallel_size": 1}),
    ),
    ids=str,
)
def test_nothing_is_measured_where_nothing_depends_on_it(
    hosts: list[str], words: dict, tmp_path: Path
) -> None:
    words = {"sequence_parallel_size": len(hosts)} | words
    for topology, lines, facts in run_processes(len(hosts), use, hosts, str(tmp_path), words):
        assert facts["error"] < 1e-10 and lines == [] and topology.name == "one-host"
    assert list(tmp_path.iterdir()) == []


def test_one_host_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    words = {"sequence_parallel_size": 2, "topology": "measure"}
    results = run_processes(2, use, ["a", "a"], str(tmp_path), words)
    assert {topology.name for topology, *_ in results} == {"measured on a"}
    assert "measured 1 hosts x 2 ranks" in results[0][1][0]


@pytest.mark.parametrize(("device", "name"), (("cpu", "one-host"), ("cuda", "measured")))
def test_one_host_of_gpus_is_measured(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on a GPU here: what measuring would say is given."""
    found = replace(one_host(2), name="measured", memory_bytes=1e9)
    monkeypatch.setattr("wf_backends.cluster.discover.measure_topology", lambda *_: found)

    def rank(comm: Communicator) -> str:
        return JobTopology(comm, None, None, tmp_path).find(torch.device(device)).name

    assert run_threads(2, rank) == [name] * 2
    assert len(list(tmp_path.iterdir())) == (device == "cuda")


def test_groups_side_by_side_are_measured_each_for_itself(tmp_path: Path) -> None:
    """Two sequences on 4 ranks; what they share of their hosts' NICs is in the figures."""
    words = {"sequence_parallel_size": 2}
    results = run_processes(4, use, ["a", "b", "a", "c"], str(tmp_path), words)
    assert [topology.name for topology, *_ in results] == 4 * ["measured on a and 1 more"]
    assert results[0][0] == results[1][0] and results[2][0] == results[3][0]
    assert len(list((tmp_path / "wallfacer").iterdir())) == 2
    assert all(facts["error"] < 1e-10 for *_, facts in results)


@pytest.mark.parametrize("hosts", (["a", "a", "b"], ["a", "b", "a", "b"]), ids=str)
def test_uneven_or_mixed_hosts_are_ranks_apart(hosts: list[str], tmp_path: Path) -> None:
    words = {"sequence_parallel_size": len(hosts)}
    results = run_processes(len(hosts), use, hosts, str(tmp_path), words)
    for topology, _, facts in results:
        assert (topology.hosts, topology.ranks_per_host) == (len(hosts), 1)
        assert topology == results[0][0] and facts["error"] < 1e-10
    assert "taken as hosts of one rank each" in results[0][1][0]


def test_a_folder_that_cannot_be_written_is_said_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wallfacer").write_text("a file in the way")
    words = {"sequence_parallel_size": 2}
    results = run_processes(2, use, ["a", "b"], str(tmp_path), words)
    assert all(facts["error"] < 1e-10 for *_, facts in results)
    assert "not kept (" in results[0][1][0]


def spoil(group: Any, hosts: list[str], folder: str, words: dict) -> tuple[Any, Any]:
    first = use(group, hosts, folder, words)
    if group.rank == 0:
        (kept,) = Path(folder, "wallfacer").iterdir()
        kept.write_text('{"name": "half a fi')
    return first, use(group, hosts, folder, words)


def test_a_spoilt_file_is_measured_again(tmp_path: Path) -> None:
    results = run_processes(2, spoil, ["a", "b"], str(tmp_path), {"sequence_parallel_size": 2})
    assert "measured" in results[0][1][1][0]
    assert all(second[2]["error"] < 1e-10 for _, second in results)


def refused(group: Any, hosts: list[str], words: dict) -> str:
    socket.gethostname = lambda: hosts[group.rank]
    with pytest.raises(ValueError) as caught:
        attend(SequenceParallel(SequenceParallelConfig.from_dict(words), group))
    return str(caught.value)


def test_a_topology_that_contradicts_the_job_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(one_host(2).to_dict() | {"memory_gib": 8}))
    words = {"sequence_parallel_size": 2, "topology": str(path)}
    for message in run_processes(2, refused, ["a", "b"], words):
        assert "contradicts the job: it has 1 hosts, the job 2: ['a', 'b']" in message
        assert '"topology": "measure"' in message
    for message in run_processes(3, refused, list("aab"), words | {"sequence_parallel_size": 3}):
        assert "pair.json: it has 2 ranks, but 3 share a sequence" in message


def use_by_mpi(world: Any, folder: str) -> tuple[str, float, int]:
    measure.NO_REPEATS_AFTER_S = 0.5
    os.environ["XDG_CACHE_HOME"] = folder
    rank = world.rank
    socket.gethostname = lambda: "ab"[rank]
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), world)
    error = attend(sp)
    return sp._attention.topology.find(CPU).name, error, len(list(Path(folder).iterdir()))


@pytest.mark.mpi
def test_measured_over_mpi(tmp_path: Path) -> None:
    for name, error, kept in run_mpi(2, use_by_mpi, str(tmp_path)):
        assert name == "measured on a and 1 more" and error < 1e-10 and kept == 1
