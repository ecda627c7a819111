"""Which of two plans is better: memory over the limit, time, bytes, memory, then simplicity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planning import SHAPE, cluster
from wf_backends.cost.workload import Cost, Workload
from wf_backends.planner.plan import Choice, Plan, Request, ranked
from wf_backends.schedule.placement import default_placement

RING, ALL_GATHER = {"name": "ring"}, {"name": "all_gather"}
MESH = {"name": "mesh", "rows": 2, "cols": 2}
MEMORY_LIMIT = 100


def plan_with(
    forward: dict[str, Any], backward: dict[str, Any] | None = None, **cost: float
) -> Plan:
    """A plan of these routes whose forward has this cost, and whose backward costs nothing."""
    routes = (default_placement(route, 4) for route in (forward, backward or forward))
    return Plan(Choice(1, *routes), Cost(**cost), Cost(), Cost())


def in_two_chunks(plan: Plan) -> Plan:
    return replace(plan, choice=replace(plan.choice, chunks=2))


FASTEST = plan_with(RING, seconds=1.0, nic_bytes=1e3, memory_bytes=MEMORY_LIMIT)
BETTER_AND_WORSE = {
    "faster, of two that are slower than a tie": (
        plan_with(RING, seconds=1.03),
        plan_with(RING, seconds=1.05),
    ),
    "fewer bytes, equally fast": (
        plan_with(RING, seconds=1.015, nic_bytes=8),
        plan_with(RING, seconds=1.0, nic_bytes=9),
    ),
    "faster, more bytes": (
        plan_with(RING, seconds=1.0, nic_bytes=9),
        plan_with(RING, seconds=1.03, nic_bytes=8),
    ),
    "more bytes on a faster link": (
        plan_with(RING, inside_bytes=9),
        plan_with(RING, nic_bytes=8),
    ),
    "less memory, equally fast": (
        plan_with(RING, memory_bytes=8, seconds=1.01),
        plan_with(RING, memory_bytes=9, seconds=1.0),
    ),
    "within the limit, slower": (
        plan_with(RING, memory_bytes=99, seconds=9),
        plan_with(RING, memory_bytes=101, seconds=1),
    ),
    "less over the limit, slower": (
        plan_with(RING, memory_bytes=101, seconds=9),
        plan_with(RING, memory_bytes=102, seconds=1),
    ),
    "fewer keys of a route": (plan_with(RING), plan_with(MESH)),
    "one route in both passes": (plan_with(MESH), plan_with(RING, ALL_GATHER)),
    "all heads at once": (plan_with(RING), in_two_chunks(plan_with(RING))),
}


@pytest.mark.parametrize(("better", "worse"), BETTER_AND_WORSE.values(), ids=BETTER_AND_WORSE)
def test_the_better_plan_ranks_first_in_any_order_of_the_candidates(
    better: Plan, worse: Plan
) -> None:
    request = Request(cluster(2, 2), Workload(SHAPE, 240), memory_bytes=MEMORY_LIMIT)
    for candidates in ([better, worse, FASTEST], [FASTEST, worse, better]):
        ranking = ranked(candidates, request)
        assert ranking.index(better) < ranking.index(worse)
