"""Rows that cross to a host once: priced, and chosen where that is faster and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import BYTES, lab_cluster, plain_cluster
from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.topology import Topology
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
from wf_backends.planner.plan import Request
from wf_backends.planner.proxy import representative
from wf_backends.planner.search import best_plan, price_plan
from wf_backends.planner.words import scheme
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.placement import Placed, place, placements

A100 = PRESETS["a100-4x-100gbe"]
KEYS_STAY = PassKind("forward", queries_walk=True), BACKWARD_QUERIES


def request(topology: Topology, heads: int, kv_heads: int, tokens: int, **more) -> Request:
    shape = Shape(1, heads, kv_heads, 128, 2)
    return Request(topology, Workload(shape, tokens * topology.size, Mask(CAUSAL)), **more)


def once(plan) -> tuple[int, int]:
    return plan.choice.forward.host_size, plan.choice.backward.host_size


@pytest.mark.parametrize("exact_up_to", (8, 0))
def test_rows_cross_once_where_that_is_faster(exact_up_to) -> None:
    """One key head, two hosts of four: all keys may be gathered, but not four times over a NIC."""
    asked = request(A100.with_ranks(8), 8, 1, 512, exact_up_to=exact_up_to)
    plan = best_plan(asked)
    assert 4 in once(plan)
    assert "all-gather 8, rows once to hosts of 4" in scheme(plan, 8)
    crosses_again = price_plan(asked, without(plan).choice)
    assert crosses_again.cost.seconds > 1.2 * plan.cost.seconds
    assert crosses_again.cost.nic_bytes > 1.2 * plan.cost.nic_bytes
    assert plan.choice.to_config(8, "zigzag")["route"]["host_size"] == 4


def without(plan):
    choice = plan.choice
    there, back = (replace(one, host_size=1) for one in (choice.forward, choice.backward))
    return replace(plan, choice=replace(choice, forward=there, backward=back))


def test_rows_cross_to_each_reader_where_links_inside_are_no_faster() -> None:
    slow = replace(A100.with_ranks(8), inside=A100.between, nics_per_host=4)
    assert once(best_plan(request(slow, 8, 1, 512))) == (1, 1)


def crossing_once(split: HeadSplit) -> list[Placed]:
    """Routes on which several ranks of a host read a row of another one, with rows that cross
    once."""
    return [
        replace(one, host_size=split.topology.ranks_per_host)
        for one in placements(split.route_size)
        if shape_of(one, split).crosses_several_times
    ]


@pytest.mark.parametrize("hosts", (1, 8))
def test_one_host_and_one_rank_a_host_have_nothing_to_pass_on(hosts) -> None:
    at = replace(A100, hosts=hosts, ranks_per_host=8 // hosts, nics_per_host=1)
    split = HeadSplit(Workload(Shape(1, 8, 8, 64, 2), 4096), at)
    assert not crossing_once(split)


def test_documents_are_planned_with_rows_that_cross_once() -> None:
    """Also where few routes are looked at, since a part of the hosts stands for all."""
    work = Workload(
        Shape(1, 8, 1, 128, 2), 2048 * 128, Mask(CAUSAL, (*range(0, 2048 * 129, 2048),))
    )
    asked = representative(Request(A100.with_ranks(128), replace(work, layout="document_zigzag")))
    assert asked.topology.size < 128
    assert {one.host_size for one in asked.forward or ()} == {1, 4}


@pytest.mark.parametrize(
    ("size", "degree", "stride"), ((16, 1, 1), (16, 2, 1), (16, 2, 4), (32, 1, 1))
)
def test_closed_forms_count_the_same_bytes_and_nearly_the_same_time(size, degree, stride) -> None:
    work = Workload(Shape(1, 8, 4, 16, 2), 1024)
    job = HeadSplit(work, lab_cluster(size // 4, 4, 4), degree, stride)
    found = crossing_once(job)
    assert found
    for placed in found:
        for kind in KEYS_STAY if placed.keys_stay else (FORWARD, BACKWARD_KEYS):
            if placed.route["name"] == "concentric":
                continue
            schedule = place(placed, job.route_size)
            exact = pass_cost(job, schedule, kind, placed.host_size)
            several = pass_cost(job, schedule, kind)
            closed = ClosedForm(job, kind).cost(shape_of(placed, job))
            assert closed.nic_bytes == pytest.approx(exact.nic_bytes), placed
            assert closed.inside_bytes == pytest.approx(exact.inside_bytes), placed
            assert exact.nic_bytes < several.nic_bytes
            assert closed.seconds == pytest.approx(exact.seconds, rel=0.25), placed


def test_what_is_passed_on_arrives_before_the_next_round_and_hides_behind_this_one() -> None:
    """Two hosts of two; the bytes take 1 s between hosts and 0.25 s inside."""
    owner = RankPhase("step 0", rounds=(PhaseRound(fetch=[(0, BYTES)]), PhaseRound()))
    for computed, took in ((0.0, [1.25, 1.25, 1.0, 0.0]), (3.0, [4.0, 3.0, 1.0, 0.0])):
        relay, reader = (
            RankPhase("step 0", rounds=(PhaseRound(pass_on=sent, seconds=computed), PhaseRound()))
            for sent in ([(1, BYTES)], [])
        )
        simulator = Simulator(plain_cluster(2, 2, 2), UlyssesGroups(4))
        simulator.run([relay, reader, owner, RankPhase("step 0")])
        assert simulator.now == pytest.approx(took)
