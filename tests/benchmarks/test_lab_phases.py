"""The lab's phases: every predicted second stands beside a measured one, in the order of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers import ROOT
from wf_backends.cluster.presets import PRESETS
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.placement import in_rank_order

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import lab_report
    import lab_timeline

ROUTES = ({"name": "ring"}, {"name": "mesh", "rows": 2, "cols": 2}, {"name": "all_gather"})


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route["name"])
def test_every_predicted_second_is_told_once(route) -> None:
    topology = replace(PRESETS["h100-8x400g"].with_ranks(8), agreement_s=0.01)
    request = Request(topology, Workload(Shape(1, 8, 8, 64, 2), 4096, Mask(CAUSAL)))
    placed = in_rank_order(route, 4)
    plan = price_plan(request, Choice(2, placed, placed))
    expected = lab_timeline.predicted_phases(plan)
    both = (plan.around, plan.forward, plan.backward)
    assert sum(expected.values()) == pytest.approx(sum(one.seconds for one in both))
    order = sorted(expected, key=lab_report.phase_order)
    assert order[:2] == ["agreement", "forward ulysses qkv"]
    assert order.index("forward ulysses out") + 1 == order.index("backward ulysses out")
    assert order[-2:] == ["backward home", "backward ulysses qkv"]
    took = {label: 1.0 for label in order if "gather" not in label} | {"rest": 0.5}
    rows = list(lab_report.align_phases(expected, took))
    assert [label for label, *_ in rows] == list(took)
    assert sum(told for _, told, _ in rows) == pytest.approx(sum(expected.values()))
    assert sum(spent for *_, spent in rows) == pytest.approx(sum(took.values()))
