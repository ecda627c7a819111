"""Rows that cross to a host once: their price, and that plans use them only where it is faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.calls import plan_of_call
from tests.planning import BYTES, lab_cluster, plain_cluster
from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.topology import Topology
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.closed_form import ClosedForm
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.route_shape import shape_of
from wf_backends.cost.simulator import PhaseRound, RankPhase, Simulator
from wf_backends.cost.workload import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD,
    HeadSplit,
    PassKind,
    Workload,
)
from wf_backends.lowering.message_bytes import Shape
from wf_backends.lowering.ulysses_groups import UlyssesGroups
from wf_backends.planner.explanation import scheme
from wf_backends.planner.plan import Choice, Plan, Request
from wf_backends.planner.proxy import representative
from wf_backends.planner.search import best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.placement import Placed, place, placements

A100 = PRESETS["a100-4x-100gbe"]
KEYS_STAY = PassKind("forward", queries_walk=True), BACKWARD_QUERIES
KEYS_WALK = FORWARD, BACKWARD_KEYS


def one_key_head(topology: Topology, **options: Any) -> Request:
    """512 tokens a rank of 8 query heads and one key head: all keys are few bytes."""
    workload = Workload(Shape(1, 8, 1, 128, 2), 512 * topology.size, Mask(CAUSAL))
    return Request(topology, workload, **options)


def host_sizes(plan: Plan) -> tuple[int, int]:
    """Of the forward and of the backward; 1 = rows cross to each reader."""
    return plan.choice.forward.host_size, plan.choice.backward.host_size


def without_host_size(choice: Choice) -> Choice:
    forward, backward = (replace(p, host_size=1) for p in (choice.forward, choice.backward))
    return replace(choice, forward=forward, backward=backward)


@pytest.mark.parametrize("exact_up_to", (8, 0))
def test_rows_cross_once_where_four_ranks_share_a_nic(exact_up_to: int) -> None:
    """Two hosts: the fastest plan gathers all keys, but not four times through a NIC."""
    request = one_key_head(A100.with_ranks(8), exact_up_to=exact_up_to)
    plan = best_plan(request)
    assert 4 in host_sizes(plan)
    assert "all-gather 8, rows once to hosts of 4" in scheme(plan, 8)
    assert plan.choice.to_config(8, "zigzag")["route"]["host_size"] == 4
    to_each_reader = price_plan(request, without_host_size(plan.choice))
    assert to_each_reader.cost.seconds > 1.2 * plan.cost.seconds
    assert to_each_reader.cost.nic_bytes > 1.2 * plan.cost.nic_bytes


@pytest.mark.parametrize(
    "options",
    (
        {"route": {"name": "all_gather"}, "ulysses_degree": "auto"},
        {
            "route": {"name": "mesh", "rows": 8, "cols": 1},
            "keep_gathered": True,
            "backward_moves": "queries",
            "ulysses_chunks": "auto",
        },
    ),
    ids=lambda options: options["route"]["name"],
)
def test_a_named_host_size_has_a_plan_that_a_config_can_name(options: dict[str, Any]) -> None:
    """Not with all heads exchanged, when a rank gathers nothing; kept rows crossed before."""
    route = options["route"] | {"host_size": 4}
    plan = plan_of_call(8, 4096, Mask(CAUSAL), A100.with_ranks(8), **options | {"route": route})
    config = SequenceParallelConfig.from_dict(plan.choice.to_config(8, "zigzag"))
    assert config.to_dict()["route"]["host_size"] == 4


def test_kept_rows_are_planned_where_all_heads_may_be_exchanged() -> None:
    """All ranks in one group leave a route of one rank, on which no row crosses."""
    documents = Mask(CAUSAL, (*range(0, 4097, 128),))
    topology = A100.with_ranks(16)
    plan = plan_of_call(16, 4096, documents, topology, layout="contiguous", keep_gathered=True)
    assert plan.choice.keep


def test_rows_cross_to_each_reader_where_links_inside_hosts_are_no_faster() -> None:
    slow_inside = replace(A100.with_ranks(8), inside=A100.between, nics_per_host=4)
    assert host_sizes(best_plan(one_key_head(slow_inside))) == (1, 1)


def routes_that_cross_once(split: HeadSplit) -> list[Placed]:
    """The routes on which several ranks of a host read a row of another host, with a host size."""
    return [
        replace(placed, host_size=split.topology.ranks_per_host)
        for placed in placements(split.route_size)
        if shape_of(placed, split).crosses_several_times
    ]


@pytest.mark.parametrize("hosts", (1, 8))
def test_no_row_crosses_several_times_on_one_host_or_with_one_rank_a_host(hosts: int) -> None:
    topology = replace(A100, hosts=hosts, ranks_per_host=8 // hosts, nics_per_host=1)
    split = HeadSplit(Workload(Shape(1, 8, 8, 64, 2), 4096), topology)
    assert not routes_that_cross_once(split)


def test_documents_on_a_part_of_the_hosts_are_planned_with_rows_that_cross_once() -> None:
    """Few routes are looked at there."""
    documents = Mask(CAUSAL, (*range(0, 2048 * 129, 2048),))
    workload = Workload(Shape(1, 8, 1, 128, 2), 2048 * 128, documents, "document_zigzag")
    request = representative(Request(A100.with_ranks(128), workload))
    assert request.topology.size < 128
    assert {placed.host_size for placed in request.forward or ()} == {1, 4}


@pytest.mark.parametrize(
    ("size", "degree", "stride"), ((16, 1, 1), (16, 2, 1), (16, 2, 4), (32, 1, 1))
)
def test_closed_forms_are_exact_in_bytes_and_near_in_time(
    size: int, degree: int, stride: int
) -> None:
    workload = Workload(Shape(1, 8, 4, 16, 2), 1024)
    split = HeadSplit(workload, lab_cluster(size // 4, 4, 4), degree, stride)
    routes = [p for p in routes_that_cross_once(split) if p.route["name"] != "concentric"]
    assert routes
    for placed in routes:
        for kind in KEYS_STAY if placed.keys_stay else KEYS_WALK:
            schedule = place(placed, split.route_size)
            exact = pass_cost(split, schedule, kind, placed.host_size)
            to_each_reader = pass_cost(split, schedule, kind)
            closed = ClosedForm(split, kind).cost(shape_of(placed, split))
            assert closed.nic_bytes == pytest.approx(exact.nic_bytes), placed
            assert closed.inside_bytes == pytest.approx(exact.inside_bytes), placed
            assert exact.nic_bytes < to_each_reader.nic_bytes
            assert closed.seconds == pytest.approx(exact.seconds, rel=0.25), placed


@pytest.mark.parametrize(
    ("tiles_s", "expected_s"),
    ((0.0, [1.25, 1.25, 1.0, 0.0]), (3.0, [4.0, 3.0, 1.0, 0.0])),
    ids=("rounds wait", "tiles hide it"),
)
def test_rows_are_passed_on_during_a_round_and_arrive_before_the_next(tiles_s, expected_s) -> None:
    """Rank 0 fetches BYTES from another host in 1 s, and passes them on to rank 1 in 0.25 s."""
    fetching = PhaseRound(pass_on=[(1, BYTES)], seconds=tiles_s), PhaseRound()
    reading = PhaseRound(seconds=tiles_s), PhaseRound()
    owner = PhaseRound(fetch=[(0, BYTES)]), PhaseRound()
    simulator = Simulator(plain_cluster(2, 2, 2), UlyssesGroups(4))
    simulator.run([RankPhase("step 0", rounds=r) for r in (fetching, reading, owner, ())])
    assert simulator.now == pytest.approx(expected_s)
