"""`wallfacer bench`: candidates on the running job, predicted beside measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.command_line import TWO_HOSTS
from tests.helpers import run_threads
from wf_backends import SequenceParallelConfig
from wf_backends.cli.options import Model
from wf_backends.cluster import Timer
from wf_backends.cluster.presets import load
from wf_backends.cluster.topology import KernelRate, from_dict
from wf_backends.comm import Communicator
from wf_backends.planner.plan import Request
from wf_backends.planner.search import all_plans
from wf_backends.planner.words import scheme


def test_bench_runs_candidates_and_keeps_the_topology(wallfacer, tmp_path: Path) -> None:
    """One process alone: no links, but kernels, the cache and the table."""
    args = ["--cache-dir", str(tmp_path), "--seqlen", "512", "--repeats", "1", "--json"]
    code, out, _ = wallfacer("bench", *args)
    told = json.loads(out)
    assert code == 0
    assert [plan["config"]["sequence_parallel_size"] for plan in told["plans"]] == [1]
    assert all(plan["measured_s"] > 0 for plan in told["plans"])
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == told["topology"]
    assert json.loads(wallfacer("bench", *args)[1])["topology"] == told["topology"]


def test_bench_cuts_a_preset_to_the_job_and_predicts_by_a_known_rate(wallfacer) -> None:
    args = ["bench", "--seqlen", "256", "--repeats", "1", "--topology"]
    told = json.loads(wallfacer(*args, "one-host", "--kernel", "reference", "--json")[1])
    assert told["topology"]["ranks_per_host"] == 1 and told["topology"]["memory_gib"] == 8
    assert (told["rate_of"], told["fastest"]["kernel"]) == ("sdpa", "reference")
    code, out, _ = wallfacer(*args, "h100-8x400g", "--kernel", "reference")
    said = " ".join(out.split())
    assert code == 0 and "by the rate of flash: the topology has none of reference" in said


def test_bench_predicts_by_the_rate_of_the_kernel_named() -> None:
    from wf_backends.cli.bench import heading, priced

    topology = load(TWO_HOSTS)
    both = replace(topology, kernels=(*topology.kernels, ("reference", KernelRate(1e6, 1e6))))
    slow = Request(both, Model(8, 2, 64, 8192, kernel="reference").workload())
    assert priced(slow) == slow and "rate" not in heading(slow)
    assert priced(replace(slow, topology=topology)).workload.kernel == "sdpa"


def test_bench_writes_a_trace(wallfacer, tmp_path: Path) -> None:
    args = ["--cache-dir", str(tmp_path), "--seqlen", "256", "--repeats", "1"]
    path = tmp_path / "trace.json"
    code, _, _ = wallfacer("bench", *args, "--trace", str(path))
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert (
        code == 0 and {"wallfacer plan Ring Attention", "wallfacer compute forward step 0"} <= names
    )
    code, _, said = wallfacer("bench", *args, "--trace", str(tmp_path / "trace.txt"))
    assert code == 2 and "--trace must end in .json" in said


def test_bench_compares_with_the_ring() -> None:
    from wf_backends.cli.bench import with_ring

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)
    chosen = with_ring(plans, request, 2)
    assert chosen[:2] == plans[:2] and len(chosen) == 3
    assert (chosen[2].choice.degree, str(chosen[2].choice.forward)) == (1, "ring")
    assert str(chosen[2].choice.backward) == "ring" and chosen[2].choice.moves == "keys"
    assert with_ring(chosen[2:], request, 1) == chosen[2:]


@pytest.mark.parametrize("share", [0.999, 1.0])
def test_bench_runs_nothing_over_the_memory(share: float) -> None:
    """Not even the ring, however few candidates are left."""
    from wf_backends.cli.bench import with_ring

    asked = Request(load("one-host", 4), Model(2, 2, 64, 8192).workload())
    ring = with_ring(all_plans(asked), asked, 2)[-1]
    request = replace(asked, memory_bytes=share * ring.cost.memory_bytes)
    chosen = with_ring(all_plans(request), request, 1000)
    assert all(plan.cost.memory_bytes <= request.memory_limit for plan in chosen)
    assert (ring.choice in [plan.choice for plan in chosen]) == (share == 1.0)
    assert 0 < len(chosen) < len(all_plans(request))
    none = replace(asked, memory_bytes=1.0)
    with pytest.raises(ValueError, match="no plan fits the memory limit"):
        with_ring(all_plans(none), none, 2)


def run_on(comm: Communicator, topology: dict) -> list[frozenset[str]]:
    """What the plans of `bench` send to trade heads for tokens, on ranks as threads."""
    from wf_backends.cli.bench import draw_inputs, prepare

    model, found = Model(8, 8, 8, 256, dtype="float32"), []
    inputs = partial(draw_inputs, model, comm.rank, torch.device("cpu"))
    request = Request(from_dict(topology), model.workload())
    for plan in [
        p for p in all_plans(request) if not p.choice.in_rank_order or p.choice.degree > 1
    ][:6]:
        comm.sent.clear()
        prepare(plan, model, comm, inputs)()
        found.append(frozenset(label for label in comm.sent if "ulysses" in label))
        assert bool(found[-1]) == (plan.choice.degree > 1)
    return found


def test_bench_runs_placements_and_degrees_through_the_config() -> None:
    topology = load("a100-4x-100gbe", 4).to_dict()
    for results in run_threads(4, run_on, topology):
        assert len(results) == 6


def in_turns(comm: Communicator) -> list[str]:
    """The order in which `bench` runs two plans: once for their buffers, then three times each."""
    from wf_backends.cli.bench import run

    ran = list[str]()
    works = [partial(ran.append, plan) for plan in ("a", "b")]
    assert len(run(works, Timer(comm, torch.device("cpu")), 3)) == 2
    return ran


def test_plans_take_turns() -> None:
    """What the machine does at first, or for a while, is on all of them."""
    assert run_threads(2, in_turns) == [["a", "b"] * 4] * 2


def test_bench_says_what_was_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    from wf_backends.cli.bench import show

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)[:3]
    show(plans, [0.3, 0.1, 0.2], request, as_json=False)
    said = capsys.readouterr().out
    assert f"Fastest here: {scheme(plans[1], 8)}. The" in said
    words = json.loads(said[said.index("{") :])
    assert words == plans[1].choice.to_config(8, "zigzag")
    assert not SequenceParallelConfig.from_dict(words).leaves_open
    show(plans, [0.3, 0.1, 0.2], request, as_json=True)
    assert json.loads(capsys.readouterr().out)["fastest"] == words
