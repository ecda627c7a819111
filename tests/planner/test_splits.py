"""Head splits: which are legal, and when heads are traded in chunks or between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import SHAPE, cluster
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.parallel.choose import request_of
from wf_backends.planner.head_splits import legal_chunks, legal_degrees, legal_strides
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.search import all_plans, best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import in_rank_order


def test_degrees_that_fit_nothing_are_refused() -> None:
    request = Request(cluster(2, 4), Workload(SHAPE, 2400), degrees=(3,))
    with pytest.raises(ValueError, match=r"no ulysses_degree of \(3,\) divides the 8 ranks"):
        best_plan(request)


def test_degrees_follow_ranks_and_heads() -> None:
    def degrees(size: int, heads: int, kv_heads: int) -> list[int]:
        shape = replace(SHAPE, heads=heads, kv_heads=kv_heads)
        return legal_degrees(Request(cluster(1, size), Workload(shape, 240)))

    assert degrees(8, 8, 2) == [1, 2, 4, 8]
    assert degrees(8, 4, 4) == [1, 2, 4]
    assert degrees(12, 12, 3) == [1, 3, 6, 12]
    assert degrees(8, 1, 1) == [1]


@pytest.mark.parametrize(
    ("request_", "strides"),
    [
        (Request(cluster(4, 2), Workload(SHAPE, 4096)), {1: [1], 2: [1, 2], 4: [1, 2], 8: [1]}),
        (Request(cluster(4, 4), Workload(SHAPE, 4096)), {2: [1, 4], 4: [1, 4], 8: [1, 2], 16: [1]}),
        (Request(cluster(1, 8), Workload(SHAPE, 4096)), {2: [1], 4: [1]}),
        (Request(cluster(4, 2), Workload(SHAPE, 4096, Mask(Band(9, 0)))), {2: [1], 4: [1]}),
        (Request(cluster(4, 2), Workload(SHAPE, 4096), strides=(4,)), {1: [4], 2: [4], 4: []}),
    ],
)
def test_which_ranks_may_trade_heads(request_: Request, strides: dict[int, list[int]]) -> None:
    for degree, legal in strides.items():
        assert legal_strides(request_, degree) == legal


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunks"),
    [
        (8, 8, {1: [1], 2: [1, 2, 4], 4: [1, 2], 8: [1]}),
        (8, 2, {2: [1], 4: [1], 8: [1]}),  # whole groups of query heads
        (32, 8, {2: [1, 2, 4], 4: [1, 2]}),
        (24, 24, {2: [1, 2, 3, 4, 6], 4: [1, 2, 3, 6]}),  # 8 at most
    ],
)
def test_in_how_many_chunks_heads_may_be_traded(heads, kv_heads, chunks) -> None:
    request = Request(cluster(4, 2), Workload(replace(SHAPE, heads=heads, kv_heads=kv_heads), 4096))
    window = replace(request, workload=replace(request.workload, mask=Mask(Band(9, 0))))
    for degree, legal in chunks.items():
        assert legal_chunks(request, degree) == legal
        assert legal_chunks(window, degree) == [1]
        named = replace(request, chunks=(2,))
        assert legal_chunks(named, degree) == [count for count in legal if count == 2]


@pytest.mark.parametrize("exact_up_to", [8, 0])
def test_where_exchanges_are_long_heads_are_traded_in_chunks(exact_up_to: int) -> None:
    topology = cluster(4, 2, gbit=0.05)
    work = Workload(replace(SHAPE, heads=16, kv_heads=16), 8192, Mask(CAUSAL))
    request = Request(topology, work, exact_up_to=exact_up_to)
    found, at_once = best_plan(request), best_plan(replace(request, chunks=(1,)))
    assert found.choice.chunks > 1 == at_once.choice.chunks
    assert found.cost.seconds < 0.8 * at_once.cost.seconds
    words = found.choice.to_config(8, "zigzag")
    assert words["ulysses_chunks"] == found.choice.chunks
    call = plan_for(
        request_of(SequenceParallelConfig.from_dict(words), work.shape, 8192, work.mask, topology)
    )
    assert call.choice == found.choice
    assert price_plan(request, found.choice) == found


def test_all_heads_at_once_in_rank_order_is_the_simplest() -> None:
    ring = in_rank_order({"name": "ring"}, 4)
    request = Request(cluster(4, 2), Workload(SHAPE, 4096))
    plain = price_plan(request, Choice(2, ring, ring)).choice
    assert plain.complexity < replace(plain, chunks=2).complexity
    assert plain.complexity < replace(plain, stride=2).complexity
    assert replace(plain, chunks=2).in_rank_order


def test_chunks_that_no_head_split_allows_are_refused() -> None:
    odd = Request(cluster(4, 2), Workload(replace(SHAPE, heads=8, kv_heads=8), 4096), chunks=(3,))
    with pytest.raises(
        ValueError, match=r"ulysses_chunks \(3,\) divides neither .* \(8 heads, 8 key"
    ):
        best_plan(odd)


@pytest.mark.parametrize("exact_up_to", [8, 0])
def test_where_hosts_are_many_heads_are_traded_between_them(exact_up_to: int) -> None:
    """Each rank of a pair on a host then trades with its like, and the pair shares the route."""
    topology = cluster(4, 2, gbit=0.02)
    work = Workload(replace(SHAPE, heads=4, kv_heads=4), 4096, Mask(CAUSAL))
    request = Request(topology, work, exact_up_to=exact_up_to)
    found, near = best_plan(request), best_plan(replace(request, strides=(1,)))
    assert (found.choice.degree, found.choice.stride) == (4, 2)
    assert found.cost.seconds < 0.9 * near.cost.seconds
    assert found.cost.nic_bytes < near.cost.nic_bytes
    words = found.choice.to_config(8, "zigzag")
    assert words["ulysses_stride"] == 2
    call = plan_for(
        request_of(SequenceParallelConfig.from_dict(words), work.shape, 4096, work.mask, topology)
    )
    assert (call.choice.degree, call.choice.stride) == (4, 2)
    assert price_plan(request, found.choice).cost == found.cost


def test_where_nothing_fits_the_memory_chunks_are_looked_at_that_only_save_it() -> None:
    """On one host they hide next to nothing."""
    shape = replace(SHAPE, heads=32, kv_heads=8, head_dim=128)
    request = Request(cluster(1, 8), Workload(shape, 131072, Mask(CAUSAL)))
    least = min(plan.cost.memory_bytes for plan in all_plans(request))
    limited = replace(request, memory_bytes=0.7 * least)
    plan = best_plan(limited)
    assert plan.choice.chunks > 1 and plan.cost.memory_bytes <= limited.memory_limit
    assert plan == all_plans(limited)[0]
    with pytest.raises(ValueError, match=r"the closest, ulysses_degree 2, 4 chunks, forward"):
        best_plan(replace(request, memory_bytes=0.1 * least))
