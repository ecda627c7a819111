"""Head splits: which are legal, and when heads are traded in chunks or between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.calls import plan_of_call
from tests.planning import SHAPE, cluster
from wf_backends.cost.workload import Workload
from wf_backends.planner.head_splits import legal_chunks, legal_degrees, legal_strides
from wf_backends.planner.plan import Choice, Plan, Request
from wf_backends.planner.search import all_plans, best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import default_placement


def plan_of_config(request: Request, plan: Plan) -> Plan:
    """The plan of a call with the config that a plan gives."""
    options = plan.choice.to_config(8, "zigzag")
    size, workload = options.pop("sequence_parallel_size"), request.workload
    return plan_of_call(
        size, workload.seqlen, workload.mask, request.topology, workload.shape, **options
    )


def test_a_degree_that_divides_nothing_is_refused() -> None:
    request = Request(cluster(2, 4), Workload(SHAPE, 2400), degrees=(3,))
    with pytest.raises(ValueError, match=r"no ulysses_degree of 3 divides the 8 ranks"):
        best_plan(request)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "degrees"),
    [
        (8, 8, 2, [1, 2, 4, 8]),
        (8, 4, 4, [1, 2, 4]),
        (12, 12, 3, [1, 3, 6, 12]),
        (8, 1, 1, [1]),
    ],
)
def test_legal_degrees_follow_from_ranks_and_heads(
    size: int, heads: int, kv_heads: int, degrees: list[int]
) -> None:
    shape = replace(SHAPE, heads=heads, kv_heads=kv_heads)
    assert legal_degrees(Request(cluster(1, size), Workload(shape, 240))) == degrees


@pytest.mark.parametrize(
    ("request_", "strides"),
    [
        (Request(cluster(4, 2), Workload(SHAPE, 4096)), {1: [1], 2: [1, 2], 4: [1, 2], 8: [1]}),
        (Request(cluster(4, 4), Workload(SHAPE, 4096)), {2: [1, 4], 4: [1, 4], 8: [1, 2], 16: [1]}),
        (Request(cluster(1, 8), Workload(SHAPE, 4096)), {2: [1], 4: [1]}),
        (Request(cluster(4, 2), Workload(SHAPE, 4096, Mask(Band(9, 0)))), {2: [1], 4: [1]}),
        (Request(cluster(4, 2), Workload(SHAPE, 4096), strides=(4,)), {1: [4], 2: [4], 4: []}),
    ],
    ids=("hosts of 2", "hosts of 4", "one host", "window", "named"),
)
def test_legal_strides_are_1_and_one_host_or_those_of_the_request(
    request_: Request, strides: dict[int, list[int]]
) -> None:
    assert {degree: legal_strides(request_, degree) for degree in strides} == strides


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunks"),
    [
        (8, 8, {1: [1], 2: [1, 2, 4], 4: [1, 2], 8: [1]}),
        (8, 2, {2: [1], 4: [1], 8: [1]}),  # a chunk has whole groups of query heads
        (32, 8, {2: [1, 2, 4], 4: [1, 2]}),
        (24, 24, {2: [1, 2, 3, 4, 6], 4: [1, 2, 3, 6]}),  # at most 8
    ],
)
def test_legal_chunks_divide_the_heads_of_a_rank(
    heads: int, kv_heads: int, chunks: dict[int, list[int]]
) -> None:
    request = Request(cluster(4, 2), Workload(replace(SHAPE, heads=heads, kv_heads=kv_heads), 4096))
    window = replace(request, workload=replace(request.workload, mask=Mask(Band(9, 0))))
    named = replace(request, chunks=(2,))
    for degree, legal in chunks.items():
        assert legal_chunks(request, degree) == legal
        assert legal_chunks(window, degree) == [1]
        assert legal_chunks(named, degree) == [count for count in legal if count == 2]


@pytest.mark.parametrize("exact_up_to", [8, 0])
def test_heads_are_traded_in_chunks_where_exchanges_are_long(exact_up_to: int) -> None:
    workload = Workload(replace(SHAPE, heads=16, kv_heads=16), 8192, Mask(CAUSAL))
    request = Request(cluster(4, 2, gbit=0.05), workload, exact_up_to=exact_up_to)
    plan, at_once = best_plan(request), best_plan(replace(request, chunks=(1,)))
    assert plan.choice.chunks > 1 == at_once.choice.chunks
    assert plan.cost.seconds < 0.8 * at_once.cost.seconds
    assert price_plan(request, plan.choice) == plan
    assert plan.choice.to_config(8, "zigzag")["ulysses_chunks"] == plan.choice.chunks
    assert plan_of_config(request, plan).choice == plan.choice


@pytest.mark.parametrize("exact_up_to", [8, 0])
def test_heads_are_traded_between_hosts_where_nics_are_slow(exact_up_to: int) -> None:
    """A rank trades with the equal ranks of the other hosts, and the two ranks of a host form the
    route."""
    workload = Workload(replace(SHAPE, heads=4, kv_heads=4), 4096, Mask(CAUSAL))
    request = Request(cluster(4, 2, gbit=0.02), workload, exact_up_to=exact_up_to)
    plan, inside_hosts = best_plan(request), best_plan(replace(request, strides=(1,)))
    assert (plan.choice.degree, plan.choice.stride) == (4, 2)
    assert plan.cost.seconds < 0.9 * inside_hosts.cost.seconds
    assert plan.cost.nic_bytes < inside_hosts.cost.nic_bytes
    assert price_plan(request, plan.choice).cost == plan.cost
    assert plan.choice.to_config(8, "zigzag")["ulysses_stride"] == 2
    configured = plan_of_config(request, plan).choice
    assert (configured.degree, configured.stride) == (4, 2)


def test_all_heads_at_once_among_neighbours_is_the_simplest_split() -> None:
    ring = default_placement({"name": "ring"}, 4)
    request = Request(cluster(4, 2), Workload(SHAPE, 4096))
    choice = price_plan(request, Choice(2, ring, ring)).choice
    assert choice.complexity < replace(choice, chunks=2).complexity
    assert choice.complexity < replace(choice, stride=2).complexity
    assert replace(choice, chunks=2).in_rank_order


def test_chunks_that_no_head_split_allows_are_refused() -> None:
    shape = replace(SHAPE, heads=8, kv_heads=8)
    request = Request(cluster(4, 2), Workload(shape, 4096), chunks=(3,))
    message = r"ulysses_chunks 3 divides neither .* ulysses_degree of 1, 2, 4, 8 \(8 heads, 8 key"
    with pytest.raises(ValueError, match=message):
        best_plan(request)


def test_chunks_that_only_save_memory_are_looked_at_where_nothing_else_fits() -> None:
    """On one host, where chunks hide next to nothing."""
    shape = replace(SHAPE, heads=32, kv_heads=8, head_dim=128)
    request = Request(cluster(1, 8), Workload(shape, 131072, Mask(CAUSAL)))
    min_bytes = min(plan.cost.memory_bytes for plan in all_plans(request))
    limited = replace(request, memory_bytes=0.7 * min_bytes)
    plan = best_plan(limited)
    assert plan.choice.chunks > 1 and plan.cost.memory_bytes <= limited.memory_limit
    assert plan == all_plans(limited)[0]
    with pytest.raises(
        ValueError, match=r"the closest, USP, Ulysses 2 x ring 4, heads in 4 parts, needs"
    ):
        best_plan(replace(request, memory_bytes=0.1 * min_bytes))
