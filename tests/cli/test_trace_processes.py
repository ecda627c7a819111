"""A trace of real processes: the tiles that every rank computed, and its waits for messages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers import run_processes
from wf_backends.cli.bench import draw_inputs, prepare, write_trace
from wf_backends.cli.options import Model
from wf_backends.cluster.presets import PRESETS
from wf_backends.comm import Communicator
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.placement import default_placement

pytestmark = pytest.mark.processes


def trace(comm: Communicator, path: str) -> None:
    torch.set_num_threads(1)
    model = Model(4, 2, 16, 256, dtype="float32")
    request = Request(PRESETS["one-host"].with_ranks(comm.size), model.workload())
    mesh = default_placement({"name": "mesh", "rows": 2, "cols": comm.size // 2}, comm.size)
    plan = price_plan(request, Choice(1, mesh, mesh))
    work = prepare(plan, model, comm, partial(draw_inputs, model, comm.rank, torch.device("cpu")))
    write_trace([plan], [work], comm, Path(path))


def test_every_rank_writes_its_tiles_and_its_waits(tmp_path: Path) -> None:
    run_processes(4, trace, str(tmp_path / "trace.json"))
    spans = {
        "wallfacer plan mesh 2 x 2",
        *(f"wallfacer compute {name} step {i}" for name in ("forward", "backward") for i in (0, 1)),
        *(f"wallfacer wait forward {label}" for label in ("gather", "step 0")),
    }
    for rank in range(4):
        written = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        assert spans <= {event.get("name", "") for event in written["traceEvents"]}
