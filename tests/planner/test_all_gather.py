"""All-gather brings keys together behind tiles: in the plan, in its price and in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.workload import FORWARD, HeadSplit, Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.placement import Placed, in_rank_order, place, routes

SHAPE = Shape(batch=1, heads=4, kv_heads=4, head_dim=16, itemsize=2)
ROUTE = in_rank_order({"name": "all_gather"}, 4)
ROWS = 256  # of a rank
LATENCY_S = 1e-3


def job_of(bytes_per_s: float) -> HeadSplit:
    topology = Topology(
        name="four hosts",
        hosts=4,
        ranks_per_host=1,
        nics_per_host=1,
        inside=Link(0.0, 1e9),
        between=Link(LATENCY_S, bytes_per_s),
        kernels=(("sdpa", KernelRate(1e9, 1e9, 0.0)),),
        memory_bytes=1e9,
    )
    return HeadSplit(Workload(SHAPE, 4 * ROWS), topology)


def forward_of(job: HeadSplit, placed: Placed, exact_up_to: int):
    request = Request(job.topology, job.workload, exact_up_to=exact_up_to)
    return price_plan(request, Choice(1, placed, placed)).forward


@pytest.mark.parametrize("exact_up_to", (1, 4), ids=("closed form", "message by message"))
@pytest.mark.parametrize("bytes_per_s", (1e6, 1e8), ids=("slow links", "fast links"))
def test_an_owners_keys_travel_behind_the_tiles_of_another(bytes_per_s, exact_up_to) -> None:
    job = job_of(bytes_per_s)
    tile_s = 4 * ROWS * ROWS * 4 * 16 / 1e9
    fetch_s = ROWS * 2 * 4 * 16 * 2 / bytes_per_s
    now = tile_s
    for owner in range(3):
        now = max(now, (owner + 1) * fetch_s + LATENCY_S) + tile_s
    cost = forward_of(job, ROUTE, exact_up_to)
    assert cost.seconds == pytest.approx(now)
    at_once = pass_cost(job, place(ROUTE, 4), FORWARD)
    assert at_once.seconds == pytest.approx(3 * fetch_s + LATENCY_S + 4 * tile_s)
    assert cost.nic_bytes == at_once.nic_bytes
    assert cost.gathered_bytes == at_once.gathered_bytes


def test_keys_stay_where_nothing_walks_and_only_they_are_gathered() -> None:
    """Queries that walk bring results home, so on any other route they had better stay."""
    for size in (4, 16):
        for route in routes(size):
            placed = in_rank_order(route, size)
            schedule = place(placed, size)
            alone = schedule.gathers() == (False, True) and not schedule.hops
            assert placed.keys_stay == alone, route
            job = job_of(1e6)
            if size == 4:
                walks = replace(FORWARD, queries_walk=alone)
                assert forward_of(job, placed, 4) == pass_cost(job, schedule, walks)
