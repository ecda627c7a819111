"""A part of the ranks that stands for all, where tokens see only near tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.calls import H100, SHAPE, drawn_documents, plan_of_call
from wf_backends.cluster.presets import PRESETS, one_host
from wf_backends.cluster.topology import Topology
from wf_backends.cost.workload import Workload
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.proxy import (
    SPARSE_EXACT_UP_TO,
    on_fewer_ranks,
    with_documents,
    with_typical_documents,
)
from wf_backends.planner.search import best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.placement import place

SHARD = 8192
A100 = PRESETS["a100-4x-100gbe"]
ROWS_128 = 128 * SHARD


def request_for(
    size: int, mask: Mask, layout: str = "contiguous", cluster: Topology = H100
) -> Request:
    return Request(cluster.with_ranks(size), Workload(SHAPE, SHARD * size, mask, layout))


def plan_on(
    size: int, mask: Mask, layout: str = "contiguous", cluster: Topology = H100, **options: Any
) -> Plan:
    """The plan of a call with a shard of SHARD tokens."""
    topology = cluster.with_ranks(size)
    return plan_of_call(size, SHARD * size, mask, topology, layout=layout, **options)


def documents(size: int, median: int) -> Mask:
    return Mask(CAUSAL, drawn_documents(SHARD * size, median, seed=1))


def equal_documents(shards: int) -> Mask:
    """On 128 ranks, of so many shards each."""
    return Mask(CAUSAL, tuple(range(0, ROWS_128 + SHARD, shards * SHARD)))


def best_seconds_of_plain_routes(request: Request) -> float:
    """Of the best ring or all-gather on all ranks."""
    part = on_fewer_ranks(request)
    assert part is not None
    plan = best_plan(replace(request, forward=part.forward, backward=part.backward))
    return plan.cost.seconds


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [1024, 8192])
def test_a_window_costs_all_ranks_what_it_costs_the_part(layout: str, window: int) -> None:
    """To a thousandth; and the plan is at most 2 % slower than the best ring or all-gather."""
    mask = make_mask(causal=True, window_size=(window, -1))
    plan = plan_on(48, mask, layout)
    all_ranks = replace(request_for(48, mask, layout), exact_up_to=48)
    seconds = price_plan(all_ranks, plan.choice).cost.seconds
    assert seconds == pytest.approx(plan.cost.seconds, rel=1e-3)
    assert seconds <= 1.02 * best_seconds_of_plain_routes(all_ranks)


def test_a_plan_for_a_window_is_the_same_for_any_number_of_hosts() -> None:
    mask = make_mask(causal=True, window_size=(SHARD, -1))
    plans = [plan_on(size, mask) for size in (32, 64, 128, 4096)]
    assert all(plan == plans[0] for plan in plans)


def test_a_plan_for_documents_is_faster_on_more_ranks_than_are_counted() -> None:
    """Than a plan for one document, on the real documents, by half."""
    size = 2 * SPARSE_EXACT_UP_TO
    mask, layout = documents(size, median=512), "document_zigzag"
    real = replace(request_for(size, mask, layout, A100), exact_up_to=size)
    for_documents, for_one_document = (
        price_plan(real, plan_on(size, m, layout, A100).choice).cost.seconds
        for m in (mask, Mask(CAUSAL))
    )
    assert for_documents < for_one_document / 1.5


@pytest.mark.parametrize(
    ("mask", "part_ranks"),
    ((Mask(Band(64, 0)), 16), (documents(72, median=512), 64)),
    ids=("window", "documents"),
)
def test_degrees_of_a_part_fit_all_ranks_and_leave_two_to_the_route(mask, part_ranks) -> None:
    part = on_fewer_ranks(request_for(72, mask))
    assert part is not None and part.degrees is not None
    assert part.topology.size == part_ranks
    assert all(72 % d == part_ranks % d == 0 and 2 * d <= part_ranks for d in part.degrees)
    assert part.topology.ranks_per_nic == H100.ranks_per_nic
    assert part.workload.seqlen == SHARD * part_ranks


WINDOW = request_for(128, Mask(Band(64, 0)))
NO_PART = {
    "causal": request_for(128, Mask(CAUSAL)),
    "unlimited to the right": request_for(128, Mask(Band(left=64))),
    "cross attention": replace(WINDOW, workload=replace(WINDOW.workload, keys=4096)),
    "a window of half the tokens": request_for(128, Mask(Band(64 * SHARD, 0))),
    "long documents": request_for(128, equal_documents(shards=16)),
    "few ranks": request_for(16, Mask(Band(64, 0))),
    "documents that are counted": request_for(64, documents(64, median=512)),
    "a degree as large as a part": replace(
        WINDOW,
        workload=replace(WINDOW.workload, shape=replace(SHAPE, heads=64)),
        degrees=(64,),
    ),
    "heads traded among ranks that are apart": replace(WINDOW, strides=(2,)),
    "heads traded in chunks": replace(WINDOW, chunks=(2,)),
    "large hosts": replace(WINDOW, topology=replace(H100, hosts=2, ranks_per_host=64)),
}


@pytest.mark.parametrize("request_", NO_PART.values(), ids=NO_PART)
def test_no_part_of_the_hosts_stands_for_all(request_: Request) -> None:
    assert on_fewer_ranks(request_) is None
    assert on_fewer_ranks(WINDOW) is not None


def test_a_named_route_of_a_fixed_size_is_planned_for_all_ranks() -> None:
    mask, mesh = make_mask(True, (1024, -1)), {"name": "mesh", "rows": 8, "cols": 16}
    plan = plan_on(128, mask, backward_route=mesh, ulysses_degree=1)
    assert plan.choice.backward.route == mesh


def test_a_named_stride_is_planned_for_all_ranks() -> None:
    mask = make_mask(True, (1024, -1))
    plan = plan_on(128, mask, ulysses_degree=8, ulysses_stride=16)
    assert (plan.choice.degree, plan.choice.stride) == (8, 16)


def test_a_window_is_planned_for_on_one_host_of_any_number_of_ranks() -> None:
    """97 ranks: a prime."""
    plan = plan_of_call(97, 97 * SHARD, make_mask(True, (1024, -1)), one_host(97))
    assert plan.choice.degree == 1
    assert place(plan.choice.forward, 97).num_ranks == 97


def test_long_documents_on_more_ranks_than_are_counted_are_planned_for_as_one() -> None:
    request = request_for(128, equal_documents(shards=12), "document_zigzag")
    assert on_fewer_ranks(request) is None
    workload = with_typical_documents(request).workload
    assert workload == with_documents(request.workload, None)
    assert (workload.mask, workload.layout) == (Mask(CAUSAL), "zigzag")


def test_documents_on_few_ranks_take_the_best_of_all_routes() -> None:
    mask = documents(8, median=2048)
    plan = plan_on(8, mask, "document_zigzag", A100)
    typical = with_typical_documents(request_for(8, mask, "document_zigzag", A100))
    assert typical.workload.mask.cu_seqlens is not None
    assert plan == best_plan(typical)
    assert plan.choice.forward.route["name"] not in ("ring", "all_gather")
