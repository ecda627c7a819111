"""Plans for masks in slices, which are priced message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import SHAPE, cluster
from tests.slices import block_causal, prefix_lm, sliced
from wf_backends.planner import Choice, Request, Workload, all_plans, plan_for, price_plan
from wf_backends.planner.proxy import representative
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.placement import default_placement

S = 2048


def request_for(mask: Mask, layout: str = "zigzag", hosts: int = 2, ranks: int = 4) -> Request:
    return Request(cluster(hosts, ranks), Workload(SHAPE, S, mask, layout))


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("layout", ("zigzag", "balanced", "contiguous"))
def test_the_plan_is_the_best_of_all_plans(ranks, layout):
    """Up to 2 %, which counts as equal."""
    request = request_for(make_mask(**block_causal(256, S)), layout, 1, ranks)
    fastest_s = min(plan.cost.seconds for plan in all_plans(request))
    assert plan_for(request).cost.seconds <= 1.02 * fastest_s


def test_slices_are_planned_for_with_ends_on_a_grid():
    """Prefixes of 100 and 120 tokens end on one border of the grid; the sequence's own end, of
    2001 tokens, stays where it is."""

    def planned_for(prefix: int) -> Request:
        request = request_for(make_mask(**prefix_lm(prefix, 2001)))
        return representative(replace(request, workload=replace(request.workload, seqlen=2001)))

    assert planned_for(100) == planned_for(120) != planned_for(400)
    workload = planned_for(100).workload
    assert workload.seqlen == max(part.q[1] for part in workload.mask.slices) == 2001


@pytest.mark.parametrize("mask_type", ("full", "causal", "inverse_causal", "bicausal"))
def test_slices_that_a_grid_empties_are_left_out(mask_type):
    """The 20 queries in the middle are less than half a cell."""
    slices = (0, 1000, 0, 1000), (1000, 1020, 0, 1000), (1020, S, 0, S)
    request = request_for(make_mask(**sliced(*((*ends, mask_type) for ends in slices))))
    planned = representative(request).workload.mask.slices
    assert [part.q for part in planned] == [(0, 1024), (1024, S)]


def test_slices_that_a_grid_would_lose_are_planned_for_as_they_are():
    """Documents of 16 tokens, a quarter of a cell."""
    documents = ((start, start + 16, start, start + 16, "causal") for start in range(0, S, 16))
    request = request_for(make_mask(**sliced(*documents)))
    assert representative(request) == request


@pytest.mark.parametrize(
    ("mask", "slices", "max_nic_ratio"),
    (
        (Mask(CAUSAL), ((0, S, 0, S, "causal"),), 1),
        (Mask(Band(300, 0)), ((0, 300, 0, 300, "causal"), (300, S, 0, S, "bicausal")), 1.1),
        (
            Mask(CAUSAL, (0, 700, S)),
            ((0, 700, 0, 700, "causal"), (700, S, 700, S, "causal")),
            1,
        ),
    ),
    ids=("causal", "window", "documents"),
)
@pytest.mark.parametrize(
    "route", ({"name": "ring"}, {"name": "double_ring", "inner": 4}), ids=("ring", "double_ring")
)
def test_a_mask_costs_the_same_in_slices(route, mask, slices, max_nic_ratio):
    """A window has an order of hops of its own, which sends less (lowering/problem.py)."""
    placed = default_placement(route, 8)
    expected, cost = (
        price_plan(request_for(m, "contiguous"), Choice(1, placed, placed)).cost
        for m in (mask, make_mask(**sliced(*slices)))
    )
    assert cost.nic_bytes <= max_nic_ratio * expected.nic_bytes
    assert cost.compute_s == pytest.approx(expected.compute_s, rel=0.02)


def test_a_balanced_layout_computes_less_long_than_zigzag():
    """Two documents of frames, for which zigzag over the whole sequence is uneven."""
    frames = [(a, a + 128, 1408 * (a >= 1408), a + 128, "full") for a in range(0, S, 128)]
    mask, ring = make_mask(**sliced(*frames)), default_placement({"name": "ring"}, 8)
    balanced, zigzag = (
        price_plan(request_for(mask, layout), Choice(1, ring, ring)).cost
        for layout in ("balanced", "zigzag")
    )
    assert balanced.compute_s < 0.9 * zigzag.compute_s


def test_closed_forms_compute_in_proportion_to_the_scores_of_the_slices():
    """On 128 ranks, with a call of 1e-5 s for each of their 128 tiles in either pass."""
    slices, full = (
        replace(request_for(mask, "balanced", 16, 8), exact_up_to=0)
        for mask in (make_mask(**block_causal(64, S)), Mask())
    )
    ring = default_placement({"name": "ring"}, 128)
    slices_cost, full_cost = (
        price_plan(request, Choice(1, ring, ring)).cost for request in (slices, full)
    )
    calls_s = 2 * 128 * 1e-5
    share = slices.workload.scores / full.workload.scores
    expected_s = share * (full_cost.compute_s - calls_s)
    assert slices_cost.compute_s - calls_s == pytest.approx(expected_s, rel=0.05)
    assert plan_for(slices).cost.seconds <= slices_cost.seconds
