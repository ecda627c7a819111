"""Plans for masks in slices: priced as they are, message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import SHAPE, cluster
from tests.slices import block_causal, prefix_lm, sliced
from wf_backends.planner import Choice, Request, Workload, all_plans, plan_for, price_plan
from wf_backends.planner.proxy import representative
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.placement import in_rank_order

S = 2048


def request(mask: Mask, layout: str = "zigzag", hosts: int = 2, ranks: int = 4) -> Request:
    return Request(cluster(hosts, ranks), Workload(SHAPE, S, mask, layout))


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("layout", ("zigzag", "balanced", "contiguous"))
def test_the_best_plan_is_the_best_of_all(ranks, layout):
    asked = request(make_mask(**block_causal(256, S)), layout, 1, ranks)
    assert plan_for(asked).cost.seconds <= 1.02 * min(p.cost.seconds for p in all_plans(asked))


def prefix(length: int, seqlen: int = S) -> Request:
    asked = request(make_mask(**prefix_lm(length, seqlen)))
    return replace(asked, workload=replace(asked.workload, seqlen=seqlen))


def test_slices_that_differ_little_are_planned_for_once():
    """Their ends are on a grid; the sequence's own end stays where it is."""
    planned = [representative(prefix(length, 2001)) for length in (100, 120, 400)]
    assert planned[0] == planned[1] != planned[2]
    found = planned[0].workload
    assert found.seqlen == max(one.q[1] for one in found.mask.slices) == 2001


def test_slices_that_a_grid_would_lose_are_planned_for_as_they_are():
    """Short documents, of which none would be left."""
    edges = range(0, S, 16)
    asked = request(make_mask(**sliced(*((a, a + 16, a, a + 16, "causal") for a in edges))))
    assert representative(asked) == asked


@pytest.mark.parametrize("route", ({"name": "ring"}, {"name": "double_ring", "inner": 4}))
def test_a_mask_costs_the_same_in_slices(route):
    """Causal, a window and documents, told in both ways; a window has an order of hops of its own,
    and costs less as `window_size` (lowering/problem.py)."""
    placed = in_rank_order(route, 8)
    told = (
        (Mask(CAUSAL), sliced((0, S, 0, S, "causal"))),
        (Mask(Band(300, 0)), sliced((0, 300, 0, 300, "causal"), (300, S, 0, S, "bicausal"))),
        (Mask(CAUSAL, (0, 700, S)), sliced((0, 700, 0, 700, "causal"), (700, S, 700, S, "causal"))),
    )
    for plain, slices in told:
        costs = [
            price_plan(request(mask, "contiguous"), Choice(1, placed, placed)).cost
            for mask in (plain, make_mask(**slices))
        ]
        assert costs[1].nic_bytes <= (1.1 if plain.band.left == 300 else 1) * costs[0].nic_bytes
        assert costs[1].compute_s == pytest.approx(costs[0].compute_s, rel=0.02)


def test_even_work_is_faster_than_uneven():
    """Two documents of frames: a zigzag over the whole sequence is not even there."""
    frames = [(a, a + 128, 1408 * (a >= 1408), a + 128, "full") for a in range(0, S, 128)]
    mask, ring = make_mask(**sliced(*frames)), in_rank_order({"name": "ring"}, 8)
    even, zigzag = (
        price_plan(request(mask, layout), Choice(1, ring, ring)).cost
        for layout in ("balanced", "zigzag")
    )
    assert even.compute_s < 0.9 * zigzag.compute_s


def test_on_more_ranks_than_are_counted_formulas_go_by_the_slices_scores():
    mask = make_mask(**block_causal(64, S))
    some, every = (
        replace(request(one, "balanced", 16, 8), exact_up_to=0) for one in (mask, Mask())
    )
    ring = in_rank_order({"name": "ring"}, 128)
    costs = [price_plan(one, Choice(1, ring, ring)).cost for one in (some, every)]
    share = some.workload.scores / every.workload.scores
    calls_s = 2 * 128 * 1e-5
    found, full = (cost.compute_s - calls_s for cost in costs)
    assert found == pytest.approx(share * full, rel=0.05)
    assert plan_for(some).cost.seconds <= costs[0].seconds
