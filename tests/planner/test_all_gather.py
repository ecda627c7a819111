"""An all-gather fetches keys of other owners while tiles are computed: its price in both counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.workload import FORWARD, Cost, HeadSplit, Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import price_plan
from wf_backends.schedule.placement import Placed, default_placement, place, routes

SHAPE = Shape(batch=1, heads=4, kv_heads=4, head_dim=16, itemsize=2)
ALL_GATHER = default_placement({"name": "all_gather"}, 4)
ROWS = 256  # of a rank
LATENCY_S = 1e-3


def on_four_hosts(bytes_per_s: float) -> HeadSplit:
    """Four ranks with a NIC each, of this rate."""
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


def forward_cost(split: HeadSplit, placed: Placed, exact_up_to: int) -> Cost:
    request = Request(split.topology, split.workload, exact_up_to=exact_up_to)
    return price_plan(request, Choice(1, placed, placed)).forward


@pytest.mark.parametrize("exact_up_to", (1, 4), ids=("closed form", "message by message"))
@pytest.mark.parametrize("bytes_per_s", (1e6, 1e8), ids=("slow links", "fast links"))
def test_keys_of_an_owner_arrive_during_the_tiles_of_the_one_before(
    bytes_per_s: float, exact_up_to: int
) -> None:
    split = on_four_hosts(bytes_per_s)
    tile_s = 4 * ROWS * ROWS * 4 * 16 / 1e9
    fetch_s = ROWS * 2 * 4 * 16 * 2 / bytes_per_s
    expected_s = tile_s  # own keys
    for owners_before in range(3):
        arrived_at = (owners_before + 1) * fetch_s + LATENCY_S
        expected_s = max(expected_s, arrived_at) + tile_s
    cost = forward_cost(split, ALL_GATHER, exact_up_to)
    assert cost.seconds == pytest.approx(expected_s)
    keys_walk = pass_cost(split, place(ALL_GATHER, 4), FORWARD)  # all keys before the first tile
    assert keys_walk.seconds == pytest.approx(3 * fetch_s + LATENCY_S + 4 * tile_s)
    assert cost.nic_bytes == keys_walk.nic_bytes
    assert cost.gathered_bytes == keys_walk.gathered_bytes


def gathers_keys_alone_without_hops(placed: Placed, size: int) -> bool:
    schedule = place(placed, size)
    return schedule.gathers() == (False, True) and not schedule.hops


@pytest.mark.parametrize("size", (4, 16))
def test_keys_stay_on_routes_that_gather_keys_alone_and_have_no_hops(size: int) -> None:
    """On other routes queries would walk, and their results would have to be sent back."""
    for route in routes(size):
        placed = default_placement(route, size)
        assert placed.keys_stay == gathers_keys_alone_without_hops(placed, size), route


@pytest.mark.parametrize("route", routes(4), ids=lambda route: str(default_placement(route, 4)))
def test_a_forward_is_priced_with_the_side_that_stays(route: dict) -> None:
    placed, split = default_placement(route, 4), on_four_hosts(1e6)
    kind = replace(FORWARD, queries_walk=gathers_keys_alone_without_hops(placed, 4))
    assert forward_cost(split, placed, 4) == pass_cost(split, place(placed, 4), kind)
