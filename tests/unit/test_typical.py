"""The documents that stand for others of their kind."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from statistics import NormalDist, geometric_mean

import pytest

from wf_backends.config import SequenceParallelConfig
from wf_backends.cost import Workload
from wf_backends.mask import CAUSAL, Mask
from wf_backends.planner import plan_call, price_plan
from wf_backends.plans import Plan, Request
from wf_backends.presets import PRESETS
from wf_backends.traffic import Shape
from wf_backends.typical import LENGTHS, typical_documents

SHAPE = Shape(1, 32, 8, 128, 2)
CLUSTERS = [PRESETS[name].with_ranks(8) for name in ("h100-8x400g", "a100-4x-100gbe")]


def drawn(seqlen: int, median: float, seed: int) -> tuple[int, ...]:
    """Log-normal documents."""
    draw = random.Random(seed)
    lengths = (1 + int(median * draw.lognormvariate(0, 1)) for _ in range(seqlen))
    return (0, *(end for end in accumulate(lengths) if end < seqlen), seqlen)


def mean_length(borders: tuple[int, ...]) -> float:
    """As a token sees it."""
    return sum((stop - start) ** 2 for start, stop in pairwise(borders)) / borders[-1]


def planned(borders: tuple[int, ...] | None, seqlen: int, topology=None, size: int = 8) -> Plan:
    config = SequenceParallelConfig(sequence_parallel_size=size, layout="document_zigzag")
    return plan_call(config, SHAPE, seqlen, Mask(CAUSAL, borders), topology)


def test_lengths_are_quantiles() -> None:
    middles = [(at + 0.5) / len(LENGTHS) for at in range(len(LENGTHS))]
    exact = [10 * 2.718281828 ** NormalDist().inv_cdf(at) for at in middles]
    assert [round(one) for one in exact] == list(LENGTHS)


@pytest.mark.parametrize("seqlen", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("parts", [8, 11, 16, 30, 64, 200])
def test_the_mean_length_is_kept_to_the_next_power_of_two(seqlen, parts) -> None:
    given = tuple(seqlen * at // parts for at in range(parts + 1))
    found = typical_documents(given, seqlen, 8)
    assert found is not None and found[0] == 0 and found[-1] == seqlen
    assert all(start < stop for start, stop in pairwise(found))
    assert mean_length(given) / 2 < mean_length(found) < 2 * mean_length(given)
    lengths = {stop - start for start, stop in pairwise(found)}
    assert len(lengths) > len(LENGTHS) / 4  # of many lengths


def test_few_documents_have_no_kind() -> None:
    for borders in ((0, 4096), (0, 100, 4096), (0, *range(1000, 4096, 900), 4096)):
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


def test_where_messages_are_not_counted_documents_are_left_out() -> None:
    assert planned(drawn(65536, 512, 0), 65536, size=16) == planned(None, 65536, size=16)


@pytest.mark.parametrize("topology", CLUSTERS, ids=lambda one: one.name)
@pytest.mark.parametrize("median", [512, 2048])
def test_who_knows_the_kind_is_faster_on_the_real_documents(topology, median) -> None:
    gains: list[float] = []
    for seed in range(4):
        borders = drawn(65536, median, seed)
        workload = Workload(SHAPE, 65536, Mask(CAUSAL, borders), "document_zigzag")
        request = Request(topology, workload)
        untold, told = (
            price_plan(
                request, plan.degree, plan.forward.placed, plan.backward.placed, plan.moves
            ).cost.seconds
            for plan in (planned(cut, 65536, topology) for cut in (None, borders))
        )
        gains.append(untold / told)
    assert geometric_mean(gains) > 1.1, gains
