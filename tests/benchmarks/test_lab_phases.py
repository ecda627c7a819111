"""The phases of the lab's report: each predicted second is in one of them, in a step's order."""

from __future__ import annotations

import pytest

from tests.helpers import ROOT
from wf_backends.cluster.presets import PRESETS
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.placement import default_placement

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import lab_report
    import lab_timeline

ROUTES = ({"name": "ring"}, {"name": "mesh", "rows": 2, "cols": 2}, {"name": "all_gather"})


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route["name"])
def test_every_predicted_second_is_in_one_phase(route) -> None:
    topology = PRESETS["h100-8x400g"].with_ranks(8)
    request = Request(topology, Workload(Shape(1, 8, 8, 64, 2), 4096, Mask(CAUSAL)))
    placed = default_placement(route, 4)
    plan = price_plan(request, Choice(2, placed, placed))
    predicted = lab_timeline.predicted_phases(plan)
    costs = (plan.around, plan.forward, plan.backward)
    assert sum(predicted.values()) == pytest.approx(sum(cost.seconds for cost in costs))
    order = sorted(predicted, key=lab_report.phase_order)
    assert order[0] == "forward ulysses qkv"
    assert order.index("forward ulysses out") + 1 == order.index("backward ulysses out")
    assert order[-2:] == ["backward reduce", "backward ulysses qkv"]
    # phases of gathering are not measured: their predicted seconds are added to the next phase
    measured = {label: 1.0 for label in order if "gather" not in label} | {"rest": 0.5}
    rows = list(lab_report.align_phases(predicted, measured))
    assert [label for label, *_ in rows] == list(measured)
    assert sum(seconds for _, seconds, _ in rows) == pytest.approx(sum(predicted.values()))
    assert sum(seconds for *_, seconds in rows) == pytest.approx(sum(measured.values()))
