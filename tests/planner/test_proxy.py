"""Some ranks that stand for all, where tokens see only near ones."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from wf_backends.cluster.presets import PRESETS, one_host
from wf_backends.cluster.topology import Topology
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.proxy import (
    SPARSE_EXACT_UP_TO,
    on_fewer_ranks,
    with_documents,
    with_typical_documents,
)
from wf_backends.planner.search import best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.placement import place

SHAPE = Shape(1, 32, 8, 128, 2)
SHARD = 8192
CLUSTER = PRESETS["h100-8x400g"]
ETHERNET = PRESETS["a100-4x-100gbe"]


def documents(seqlen: int, median: int) -> tuple[int, ...]:
    """Log-normal ones."""
    draw = random.Random(1)
    ends = accumulate(1 + int(median * draw.lognormvariate(0, 1)) for _ in range(seqlen))
    return (0, *(end for end in ends if end < seqlen), seqlen)


def request(
    size: int, mask: Mask, layout: str = "contiguous", cluster: Topology = CLUSTER
) -> Request:
    return Request(cluster.with_ranks(size), Workload(SHAPE, SHARD * size, mask, layout))


def planned(
    size: int, mask: Mask, layout: str = "contiguous", cluster: Topology = CLUSTER, **words: Any
) -> Plan:
    config = SequenceParallelConfig(sequence_parallel_size=size, layout=layout, **words)
    return plan_for(request_of(config, SHAPE, SHARD * size, mask, cluster.with_ranks(size)))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [1024, 8192])
def test_a_window_costs_all_ranks_what_it_costs_some(layout, window) -> None:
    mask = make_mask(True, (window, -1))
    plan = planned(48, mask, layout)
    all_ranks = replace(request(48, mask, layout), exact_up_to=48)
    assert price_plan(all_ranks, plan.choice).cost.seconds == pytest.approx(
        plan.cost.seconds, rel=1e-3
    )
    assert price_plan(all_ranks, plan.choice).cost.seconds <= 1.02 * best_of_few(all_ranks)


def best_of_few(asked: Request) -> float:
    """Seconds of the best ring or all-gather on all ranks."""
    routes = on_fewer_ranks(asked)
    assert routes is not None
    return best_plan(replace(asked, forward=routes.forward, backward=routes.backward)).cost.seconds


def test_a_plan_for_a_window_is_the_same_for_any_number_of_hosts() -> None:
    mask = make_mask(True, (SHARD, -1))
    plans = [planned(size, mask) for size in (32, 64, 128, 4096)]
    assert all(plan == plans[0] for plan in plans)


def test_what_documents_send_is_known_beyond_what_is_counted() -> None:
    size = 2 * SPARSE_EXACT_UP_TO
    mask = Mask(CAUSAL, documents(SHARD * size, 512))
    asked = "document_zigzag", ETHERNET
    plans = [planned(size, one, *asked) for one in (Mask(CAUSAL), mask)]
    real = replace(request(size, mask, *asked), exact_up_to=size)
    untold, told = (price_plan(real, plan.choice).cost.seconds for plan in plans)
    assert told < untold / 1.5


def test_the_head_split_leaves_ranks_to_the_route_and_divides_all() -> None:
    for size, mask in ((72, Mask(Band(64, 0))), (72, Mask(CAUSAL, documents(72 * SHARD, 512)))):
        part = on_fewer_ranks(request(size, mask))
        assert part is not None and part.degrees is not None
        some = part.topology.size
        assert some == (16 if mask.cu_seqlens is None else 64)
        assert all(size % d == some % d == 0 and 2 * d <= some for d in part.degrees)
        assert part.topology.ranks_per_nic == CLUSTER.ranks_per_nic
        assert part.workload.seqlen == SHARD * some


def test_where_no_part_of_the_hosts_can_stand_for_all() -> None:
    near = Mask(Band(64, 0))
    full = request(128, near)
    many = replace(full.workload, shape=replace(SHAPE, heads=64))
    asked = {
        "far": request(128, Mask(CAUSAL)),
        "far on the right": request(128, Mask(Band(left=64))),
        "cross attention": replace(full, workload=replace(full.workload, keys=4096)),
        "a window of half the tokens": request(128, Mask(Band(64 * SHARD, 0))),
        "long documents": request(128, Mask(CAUSAL, tuple(range(0, 129 * SHARD, 16 * SHARD)))),
        "a few ranks": request(16, near),
        "documents that may be counted": request(64, Mask(CAUSAL, documents(64 * SHARD, 512))),
        "as many heads traded as there are ranks": replace(full, workload=many, degrees=(64,)),
        "heads traded among ranks that are apart": replace(full, strides=(2,)),
        "heads traded in chunks": replace(full, chunks=(2,)),
        "large hosts": replace(full, topology=replace(CLUSTER, hosts=2, ranks_per_host=64)),
    }
    for why, one in asked.items():
        assert on_fewer_ranks(one) is None, why
    assert on_fewer_ranks(full) is not None


def test_a_route_that_has_no_part_is_planned_for_as_it_is() -> None:
    mask = make_mask(True, (1024, -1))
    named = {"name": "mesh", "rows": 8, "cols": 16}
    plan = planned(128, mask, backward_route=named, ulysses_degree=1)
    assert plan.choice.backward.route == named


def test_heads_traded_among_ranks_that_are_apart_by_name_are_on_any_number_of_ranks() -> None:
    mask = make_mask(True, (1024, -1))
    plan = planned(128, mask, ulysses_degree=8, ulysses_stride=16)
    assert (plan.choice.degree, plan.choice.stride) == (8, 16)


def test_one_host_of_any_number_of_ranks() -> None:
    config = SequenceParallelConfig(sequence_parallel_size=97)
    mask = make_mask(True, (1024, -1))
    plan = plan_for(request_of(config, SHAPE, 97 * SHARD, mask, one_host(97)))
    assert plan.choice.degree == 1
    assert place(plan.choice.forward, 97).num_ranks == 97


def test_long_documents_beyond_what_is_counted_are_one() -> None:
    long = Mask(CAUSAL, tuple(range(0, 129 * SHARD, 12 * SHARD)))
    asked = request(128, long, "document_zigzag")
    assert on_fewer_ranks(asked) is None
    work = with_typical_documents(asked).workload
    assert work == with_documents(asked.workload, None)
    assert (work.mask, work.layout) == (Mask(CAUSAL), "zigzag")


def test_few_ranks_take_the_best_of_all_routes() -> None:
    mask = Mask(CAUSAL, documents(8 * SHARD, 2048))
    plan = planned(8, mask, "document_zigzag", ETHERNET)
    asked = with_typical_documents(request(8, mask, "document_zigzag", ETHERNET))
    assert asked.workload.mask.cu_seqlens is not None
    assert plan == best_plan(asked)
    assert plan.choice.forward.route["name"] not in ("ring", "all_gather")
