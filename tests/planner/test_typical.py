"""The documents that stand for others of their kind."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise, product
from statistics import NormalDist, geometric_mean
from typing import Any

import pytest

from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.topology import Topology
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.proxy import DOCUMENT_LENGTHS, typical_documents
from wf_backends.planner.search import best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Mask, make_mask

SHAPE = Shape(1, 32, 8, 128, 2)
CLUSTERS = ("h100-8x400g", "a100-4x-100gbe")


def drawn(seqlen: int, median: float, seed: int) -> tuple[int, ...]:
    """Log-normal documents."""
    draw = random.Random(seed)
    lengths = (1 + int(median * draw.lognormvariate(0, 1)) for _ in range(seqlen))
    return (0, *(end for end in accumulate(lengths) if end < seqlen), seqlen)


def mean_length(borders: tuple[int, ...]) -> float:
    """As a token sees it."""
    return sum((stop - start) ** 2 for start, stop in pairwise(borders)) / borders[-1]


def planned(
    borders: tuple[int, ...] | None,
    seqlen: int,
    topology: Topology | None = None,
    size: int = 8,
    **words: Any,
) -> Plan:
    words = {"layout": "document_zigzag", **words}
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **words})
    return plan_for(request_of(config, SHAPE, seqlen, Mask(CAUSAL, borders), topology))


def test_lengths_are_quantiles() -> None:
    middles = [(at + 0.5) / len(DOCUMENT_LENGTHS) for at in range(len(DOCUMENT_LENGTHS))]
    exact = [10 * 2.718281828 ** NormalDist().inv_cdf(at) for at in middles]
    assert [round(one) for one in exact] == list(DOCUMENT_LENGTHS)


@pytest.mark.parametrize("seqlen", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("parts", [4, 6, 8, 11, 16, 30, 64])
def test_the_mean_length_is_kept_to_the_next_power_of_two(seqlen, parts) -> None:
    given = tuple(seqlen * at // parts for at in range(parts + 1))
    found = typical_documents(given, seqlen, 8)
    assert found is not None and found[0] == 0 and found[-1] == seqlen
    assert all(start < stop for start, stop in pairwise(found))
    assert mean_length(given) / 2 < mean_length(found) < 2 * mean_length(given)
    lengths = {stop - start for start, stop in pairwise(found)}
    assert len(lengths) > min(len(DOCUMENT_LENGTHS) / 4, parts)  # of many lengths


def test_few_documents_have_no_kind() -> None:
    for borders in ((0, 4096), (0, 100, 4096), (0, 2000, 4096)):
        assert typical_documents(borders, 4096, 8) is None


def test_the_shortest_documents_are_all_of_one_kind() -> None:
    short, shorter = (tuple(range(0, 1 << 16, step)) + (1 << 16,) for step in (128, 4))
    assert typical_documents(short, 1 << 16, 8) == typical_documents(shorter, 1 << 16, 8)
    assert typical_documents(short, 1 << 16, 8) != typical_documents(short, 1 << 16, 64)


def test_batches_of_a_kind_share_a_plan() -> None:
    batches = [drawn(65536, 2048, seed) for seed in range(12)]
    kinds = {typical_documents(one, 65536, 8) for one in batches}
    assert len(kinds) <= 3
    assert len({planned(one, 65536) for one in batches}) == len(kinds)


def test_few_documents_are_planned_as_one() -> None:
    plans = [planned(borders, 240) for borders in (None, (0, 240), (0, 10, 240))]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("size", [8, 16])
def test_documents_may_fit_where_one_does_not(size) -> None:
    topology, seqlen = PRESETS["h100-8x400g"].with_ranks(size), 8192 * size
    words = {"size": size, "route": "all_gather", "ulysses_degree": 1}
    packed = drawn(seqlen, 256, 0)
    one, many = (planned(cut, seqlen, topology, **words) for cut in (None, packed))
    assert many.cost.memory_bytes < one.cost.memory_bytes
    between = (many.cost.memory_bytes + one.cost.memory_bytes) / 2
    small = replace(topology, memory_bytes=between)
    assert planned(packed, seqlen, small, **words).choice == many.choice
    for cut, limit in ((None, between), (packed, many.cost.memory_bytes / 2)):
        with pytest.raises(ValueError, match="no plan fits the memory limit"):
            planned(cut, seqlen, replace(topology, memory_bytes=limit), **words)


@pytest.mark.parametrize("size", [8, 16])
def test_who_knows_the_kind_is_faster_on_the_real_documents(size) -> None:
    seqlen, gains = 8192 * size, list[float]()
    for name, median, seed in product(CLUSTERS, (512, 2048, 4096), range(3)):
        topology, borders = PRESETS[name].with_ranks(size), drawn(seqlen, median, seed)
        workload = Workload(SHAPE, seqlen, Mask(CAUSAL, borders), "document_zigzag")
        request = Request(topology, workload, exact_up_to=size)
        untold, told = (
            price_plan(request, planned(cut, seqlen, topology, size).choice).cost.seconds
            for cut in (None, borders)
        )
        gains.append(untold / told)
    assert geometric_mean(gains) > 1.1, gains
    assert min(gains) > 0.75, gains


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("window", "gain"), [(1024, 3.0), (4096, 1.0), (16384, 1.0)])
def test_windows_are_counted_where_closed_forms_count_too_much(layout, window, gain) -> None:
    topology, seqlen = PRESETS["h100-8x400g"].with_ranks(16), 131072
    mask = make_mask(True, (window, -1))
    workload = Workload(replace(SHAPE, kv_heads=32), seqlen, mask, layout)
    request = Request(topology, workload)
    config = SequenceParallelConfig(sequence_parallel_size=16, layout=layout)
    plan = plan_for(request_of(config, workload.shape, seqlen, mask, topology))
    by_forms = price_plan(replace(request, exact_up_to=16), best_plan(request).choice)
    assert by_forms.cost.seconds >= gain * plan.cost.seconds


@pytest.mark.parametrize("size", [8, 16])
def test_what_a_config_names_is_kept(size) -> None:
    borders = drawn(65536, 512, 0)
    named = planned(borders, 65536, size=size, route="ring", ulysses_degree=2)
    assert (named.choice.degree, named.choice.forward.route) == (2, {"name": "ring"})
    words = {"backward_route": {"name": "mesh", "rows": 2, "cols": size // 4}, "ulysses_degree": 2}
    plan = planned(borders, 65536, size=size, **words)
    assert plan.choice.backward.route["name"] == "mesh"


@pytest.mark.parametrize("size", [8, 16])
def test_documents_that_fit_no_memory_are_refused(size) -> None:
    small = replace(PRESETS["h100-8x400g"].with_ranks(size), memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="no plan fits the memory limit"):
        planned(drawn(65536, 512, 0), 65536, small, size)


@pytest.mark.parametrize("keep", [False, True])
def test_a_plan_priced_again_costs_what_it_would_have(keep) -> None:
    topology = PRESETS["a100-4x-100gbe"].with_ranks(8)
    workload = Workload(SHAPE, 8192, Mask(CAUSAL))
    request = Request(topology, workload, degrees=(2,), keeps=(keep,), layers=3)
    plan = best_plan(request)
    assert price_plan(request, plan.choice) == plan
    longer = replace(request, workload=replace(workload, seqlen=16384))
    both = (plan.choice.forward,), (plan.choice.backward,)
    split = {"strides": (plan.choice.stride,), "chunks": (plan.choice.chunks,)}
    named = replace(longer, forward=both[0], backward=both[1], moves=(plan.choice.moves,), **split)
    assert price_plan(longer, plan.choice) == best_plan(named)
