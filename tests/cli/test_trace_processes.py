"""A trace of real processes: what every rank did stands beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_processes
from wf_backends.cli.bench import Inputs, prepare
from wf_backends.cli.options import Model
from wf_backends.cli.trace import from_all_ranks, record, write
from wf_backends.cluster.presets import PRESETS
from wf_backends.comm import Communicator
from wf_backends.planner.plan import Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.placement import in_rank_order

pytestmark = pytest.mark.processes


def trace(comm: Communicator, path: str) -> None:
    torch.set_num_threads(1)
    model = Model(4, 2, 16, 256, dtype="float32")
    request = Request(PRESETS["one-host"].with_ranks(comm.size), model.workload())
    mesh = in_rank_order({"name": "mesh", "rows": 2, "cols": comm.size // 2}, comm.size)
    plan = price_plan(request, 1, mesh, mesh)
    inputs = Inputs(model, comm.rank, torch.device("cpu"))
    spans = from_all_ranks(record(prepare(plan, model, comm, inputs)))
    if comm.rank == 0:
        write(Path(path), [plan], [spans])


def labels(events: list[dict[str, Any]], number: int, kind: str) -> set[str]:
    """What one process of a trace did on one of its tracks."""
    ours = (event for event in events if event["pid"] == number and event["ph"] == "X")
    return {event["name"] for event in ours if event["cat"] == kind}


def test_every_rank_stands_beside_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_processes(4, trace, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.rpartition(": ")[2] for name in names.values()] == [
        "predicted",
        *(f"rank {rank}" for rank in range(4)),
    ]
    computed = {f"{name} step {step}" for name in ("forward", "backward") for step in (0, 1)}
    for number in names:
        assert labels(events, number, "compute") == computed
    for rank in range(4):
        assert {"forward gather", "forward step 0"} <= labels(events, rank + 1, "wait")
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")
