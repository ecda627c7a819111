"""`wallfacer bench`: runs candidate plans on the job, and compares predicted and measured times."""

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
from wf_backends.planner.explanation import scheme
from wf_backends.planner.plan import Request
from wf_backends.planner.search import all_plans


def test_bench_measures_candidates_and_keeps_the_topology(wallfacer_json, tmp_path: Path) -> None:
    """In one process: there are no links, but kernels are measured and the cache is written."""
    args = ["bench", "--cache-dir", str(tmp_path), "--seqlen", "512", "--repeats", "1"]
    result = wallfacer_json(*args)
    assert [plan["config"]["sequence_parallel_size"] for plan in result["plans"]] == [1]
    assert all(plan["measured_s"] > 0 for plan in result["plans"])
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == result["topology"]
    assert wallfacer_json(*args)["topology"] == result["topology"]
    assert wallfacer_json(*args, "--topology", "measure")["topology"] == result["topology"]


def test_bench_reduces_a_preset_to_the_size_of_the_job(wallfacer, wallfacer_json) -> None:
    """The presets have no rate of the reference kernel: that of another kernel is used."""
    args = ["bench", "--seqlen", "256", "--repeats", "1", "--kernel", "reference", "--topology"]
    result = wallfacer_json(*args, "one-host")
    assert result["topology"]["ranks_per_host"] == 1 and result["topology"]["memory_gib"] == 8
    assert (result["rate_of"], result["fastest"]["kernel"]) == ("sdpa", "reference")
    code, out, _ = wallfacer(*args, "h100-8x400g")
    message = "by the rate of sdpa: the topology has none of reference"
    assert code == 0 and message in " ".join(out.split())


def test_bench_predicts_by_the_rate_of_the_named_kernel_if_there_is_one() -> None:
    from wf_backends.cli.bench import heading, with_rate

    without_rate = load(TWO_HOSTS)
    kernels = (*without_rate.kernels, ("reference", KernelRate(1e6, 1e6)))
    rated = replace(without_rate, kernels=kernels)
    request = Request(rated, Model(8, 2, 64, 8192, kernel="reference").workload())
    assert with_rate(request) == request and "rate" not in heading(request)
    assert with_rate(replace(request, topology=without_rate)).workload.kernel == "sdpa"


def test_bench_writes_a_trace(wallfacer, tmp_path: Path) -> None:
    args = ["--cache-dir", str(tmp_path), "--seqlen", "256", "--repeats", "1"]
    path = tmp_path / "trace.json"
    code, _, _ = wallfacer("bench", *args, "--trace", str(path))
    assert code == 0
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"wallfacer plan Ring Attention", "wallfacer compute forward step 0"} <= names
    code, _, err = wallfacer("bench", *args, "--trace", str(tmp_path / "trace.txt"))
    assert code == 2 and "--trace must end in .json" in err


def test_the_ring_is_added_to_the_fastest_plans_if_it_is_not_among_them() -> None:
    from wf_backends.cli.bench import with_ring

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)
    candidates = with_ring(plans, request, 2)
    assert candidates[:2] == plans[:2] and len(candidates) == 3
    ring = candidates[2].choice
    assert (ring.degree, str(ring.forward), str(ring.backward)) == (1, "ring", "ring")
    assert ring.moves == "keys"
    assert with_ring(candidates[2:], request, 1) == candidates[2:]


@pytest.mark.parametrize("share", [0.999, 1.0])
def test_no_plan_above_the_memory_limit_is_run_not_even_the_ring(share: float) -> None:
    """The limit is `share` of the ring's memory."""
    from wf_backends.cli.bench import with_ring

    unlimited = Request(load("one-host", 4), Model(2, 2, 64, 8192).workload())
    ring = with_ring(all_plans(unlimited), unlimited, 2)[-1]
    request = replace(unlimited, memory_bytes=share * ring.cost.memory_bytes)
    candidates = with_ring(all_plans(request), request, 1000)
    assert all(plan.cost.memory_bytes <= request.memory_limit for plan in candidates)
    assert (ring.choice in [plan.choice for plan in candidates]) == (share == 1.0)
    assert 0 < len(candidates) < len(all_plans(request))


def test_bench_is_refused_if_no_plan_fits_the_memory_limit() -> None:
    from wf_backends.cli.bench import with_ring

    request = Request(load("one-host", 4), Model(2, 2, 64, 8192).workload(), memory_bytes=1.0)
    with pytest.raises(ValueError, match="no plan fits the memory limit"):
        with_ring(all_plans(request), request, 2)


def run_six_plans(comm: Communicator, topology: dict) -> list[tuple[int, bool]]:
    """(Ulysses degree, whether heads were exchanged) of 6 plans, run by the `bench` command.

    The plans are placed otherwise than in rank order, or have a degree above 1.
    """
    from wf_backends.cli.bench import draw_inputs, prepare

    model = Model(8, 8, 8, 256, dtype="float32")
    inputs = partial(draw_inputs, model, comm.rank, torch.device("cpu"))
    plans = all_plans(Request(from_dict(topology), model.workload()))
    plans = [p for p in plans if not p.choice.in_rank_order or p.choice.degree > 1]
    ran = []
    for plan in plans[:6]:
        comm.sent.clear()
        prepare(plan, model, comm, inputs)()
        ran.append((plan.choice.degree, any("ulysses" in label for label in comm.sent)))
    return ran


def test_bench_runs_placements_and_degrees_through_the_config() -> None:
    topology = load("a100-4x-100gbe", 4).to_dict()
    for ran in run_threads(4, run_six_plans, topology):
        assert len(ran) == 6
        assert all(exchanged == (degree > 1) for degree, exchanged in ran)


def order_of_runs(comm: Communicator) -> list[str]:
    """The order in which `bench` runs two plans: one warm-up and three repeats of each."""
    from wf_backends.cli.bench import run

    ran = list[str]()
    works = [partial(ran.append, plan) for plan in ("a", "b")]
    assert len(run(works, Timer(comm, torch.device("cpu")), 3)) == 2
    return ran


def test_runs_of_the_plans_alternate() -> None:
    """So that a disturbance of the machine slows all plans, not one."""
    assert run_threads(2, order_of_runs) == [["a", "b"] * 4] * 2


def test_bench_prints_the_fastest_plan_as_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    from wf_backends.cli.bench import show

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)[:3]
    show(plans, [0.3, 0.1, 0.2], request, as_json=False)
    out = capsys.readouterr().out
    assert f"Fastest here: {scheme(plans[1], 8)}. The" in out
    config = json.loads(out[out.index("{") :])
    assert config == plans[1].choice.to_config(8, "zigzag")
    assert not SequenceParallelConfig.from_dict(config).leaves_open
    show(plans, [0.3, 0.1, 0.2], request, as_json=True)
    assert json.loads(capsys.readouterr().out)["fastest"] == config
