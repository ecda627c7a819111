"""Typical documents, which stand for all batches of documents of about the same mean length."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from statistics import NormalDist, geometric_mean
from typing import Any

import pytest

from tests.planner.calls import H100, SHAPE, drawn_documents, plan_of_call
from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.topology import Topology
from wf_backends.cost.workload import Workload
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.proxy import DOCUMENT_LENGTHS, typical_documents
from wf_backends.planner.search import best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Mask, make_mask

A100 = PRESETS["a100-4x-100gbe"]


def mean_length(borders: tuple[int, ...]) -> float:
    """The mean length of the documents that tokens are in."""
    return sum((stop - start) ** 2 for start, stop in pairwise(borders)) / borders[-1]


def plan_for_documents(
    borders: tuple[int, ...] | None,
    seqlen: int,
    topology: Topology | None = None,
    size: int = 8,
    **options: Any,
) -> Plan:
    mask = Mask(CAUSAL, borders)
    return plan_of_call(size, seqlen, mask, topology, layout="document_zigzag", **options)


def test_document_lengths_are_quantiles_of_a_log_normal_distribution() -> None:
    """Of sigma 1, in tenths of the median."""
    count = len(DOCUMENT_LENGTHS)
    shares = [(i + 0.5) / count for i in range(count)]
    exact = [10 * 2.718281828 ** NormalDist().inv_cdf(share) for share in shares]
    assert [round(length) for length in exact] == list(DOCUMENT_LENGTHS)


@pytest.mark.parametrize("seqlen", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("count", [4, 6, 8, 11, 16, 30, 64])
def test_typical_documents_keep_the_mean_length_within_a_factor_of_two(
    seqlen: int, count: int
) -> None:
    equal = tuple(seqlen * i // count for i in range(count + 1))
    typical = typical_documents(equal, seqlen, 8)
    assert typical is not None and typical[0] == 0 and typical[-1] == seqlen
    assert all(start < stop for start, stop in pairwise(typical))
    assert mean_length(equal) / 2 < mean_length(typical) < 2 * mean_length(equal)
    different_lengths = {stop - start for start, stop in pairwise(typical)}
    assert len(different_lengths) > min(len(DOCUMENT_LENGTHS) / 4, count)


@pytest.mark.parametrize("borders", ((0, 4096), (0, 100, 4096), (0, 2000, 4096)), ids=str)
def test_one_or_two_documents_have_no_typical_ones(borders: tuple[int, ...]) -> None:
    assert typical_documents(borders, 4096, 8) is None


def test_very_short_documents_have_the_same_typical_ones() -> None:
    """Documents of 4 and of 128 tokens hardly leave their rank on 8 ranks; on 64 ranks those of
    128 do."""
    seqlen = 1 << 16
    tokens_128, tokens_4 = (tuple(range(0, seqlen + 1, length)) for length in (128, 4))
    assert typical_documents(tokens_128, seqlen, 8) == typical_documents(tokens_4, seqlen, 8)
    assert typical_documents(tokens_128, seqlen, 8) != typical_documents(tokens_128, seqlen, 64)


def test_batches_with_the_same_typical_documents_share_a_plan() -> None:
    batches = [drawn_documents(65536, 2048, seed) for seed in range(12)]
    typical = {typical_documents(borders, 65536, 8) for borders in batches}
    assert len(typical) <= 3
    assert len({plan_for_documents(borders, 65536) for borders in batches}) == len(typical)


def test_one_or_two_documents_are_planned_for_as_one() -> None:
    plans = [plan_for_documents(borders, 240) for borders in (None, (0, 240), (0, 10, 240))]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("size", [8, 16])
def test_documents_may_fit_the_memory_where_one_document_does_not(size: int) -> None:
    """An all-gather brings only rows that are read."""
    topology, seqlen = H100.with_ranks(size), 8192 * size
    options = {"size": size, "route": "all_gather", "ulysses_degree": 1}
    packed = drawn_documents(seqlen, 256, seed=0)
    for_one_document, for_documents = (
        plan_for_documents(borders, seqlen, topology, **options) for borders in (None, packed)
    )
    assert for_documents.cost.memory_bytes < for_one_document.cost.memory_bytes
    between = (for_documents.cost.memory_bytes + for_one_document.cost.memory_bytes) / 2
    small = replace(topology, memory_bytes=between)
    assert plan_for_documents(packed, seqlen, small, **options).choice == for_documents.choice
    for borders, limit in ((None, between), (packed, for_documents.cost.memory_bytes / 2)):
        with pytest.raises(ValueError, match="no plan fits the memory limit"):
            smaller = replace(topology, memory_bytes=limit)
            plan_for_documents(borders, seqlen, smaller, **options)


@pytest.mark.parametrize("size", [8, 16])
def test_plans_for_typical_documents_are_faster_on_the_real_documents(size: int) -> None:
    """Than plans for one document: by 10 % in the mean, and never slower by a third."""
    seqlen, gains = 8192 * size, list[float]()
    for cluster, median, seed in product((H100, A100), (512, 2048, 4096), range(3)):
        topology, borders = cluster.with_ranks(size), drawn_documents(seqlen, median, seed)
        workload = Workload(SHAPE, seqlen, Mask(CAUSAL, borders), "document_zigzag")
        real = Request(topology, workload, exact_up_to=size)
        for_one, for_typical = (
            price_plan(real, plan_for_documents(b, seqlen, topology, size).choice).cost.seconds
            for b in (None, borders)
        )
        gains.append(for_one / for_typical)
    assert geometric_mean(gains) > 1.1, gains
    assert min(gains) > 0.75, gains


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("window", "min_gain"), [(1024, 3.0), (4096, 1.0), (16384, 1.0)])
def test_a_window_is_planned_for_by_messages_which_closed_forms_overestimate(
    layout: str, window: int, min_gain: float
) -> None:
    topology, seqlen = H100.with_ranks(16), 131072
    shape, mask = replace(SHAPE, kv_heads=32), make_mask(causal=True, window_size=(window, -1))
    plan = plan_of_call(16, seqlen, mask, topology, shape, layout=layout)
    request = Request(topology, Workload(shape, seqlen, mask, layout))
    by_closed_forms = best_plan(request).choice
    exact = price_plan(replace(request, exact_up_to=16), by_closed_forms)
    assert exact.cost.seconds >= min_gain * plan.cost.seconds


@pytest.mark.parametrize("size", [8, 16])
def test_routes_and_degree_of_the_config_are_kept(size: int) -> None:
    borders = drawn_documents(65536, 512, seed=0)
    plan = plan_for_documents(borders, 65536, size=size, route="ring", ulysses_degree=2)
    assert (plan.choice.degree, plan.choice.forward.route) == (2, {"name": "ring"})
    mesh = {"name": "mesh", "rows": 2, "cols": size // 4}
    plan = plan_for_documents(borders, 65536, size=size, backward_route=mesh, ulysses_degree=2)
    assert plan.choice.backward.route["name"] == "mesh"


@pytest.mark.parametrize("size", [8, 16])
def test_documents_that_fit_no_memory_are_refused(size: int) -> None:
    small = replace(H100.with_ranks(size), memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="no plan fits the memory limit"):
        plan_for_documents(drawn_documents(65536, 512, seed=0), 65536, small, size)


@pytest.mark.parametrize("keep", [False, True])
def test_price_plan_prices_a_choice_as_the_search_does(keep: bool) -> None:
    """For the request that it was chosen for, and for a longer one that names the choice."""
    workload = Workload(SHAPE, 8192, Mask(CAUSAL))
    request = Request(A100.with_ranks(8), workload, degrees=(2,), keeps=(keep,), layers=3)
    plan = best_plan(request)
    choice = plan.choice
    assert price_plan(request, choice) == plan
    longer = replace(request, workload=replace(workload, seqlen=16384))
    named = replace(
        longer,
        forward=(choice.forward,),
        backward=(choice.backward,),
        moves=(choice.moves,),
        strides=(choice.stride,),
        chunks=(choice.chunks,),
    )
    assert price_plan(longer, choice) == best_plan(named)
