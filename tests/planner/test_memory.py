"""Plans under a memory limit, and plans that keep gathered rows for the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import SHAPE, cluster
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.workload import FORWARD, HeadSplit, Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.explanation import scheme
from wf_backends.planner.plan import Choice, Request
from wf_backends.planner.proxy import representative
from wf_backends.planner.search import all_plans, best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import default_placement, place, read_placed

WIDE_SHAPE = Shape(batch=1, heads=4, kv_heads=4, head_dim=64, itemsize=4)


def test_more_memory_never_slows_a_plan() -> None:
    request = Request(cluster(8, 1, gbit=0.025), Workload(WIDE_SHAPE, 8192), degrees=(1,))
    ring = default_placement({"name": "ring"}, 8)
    ring_bytes = price_plan(request, Choice(1, ring, ring)).cost.memory_bytes
    limits = [ring_bytes * factor for factor in (1, 1.5, 4)]
    plans = [best_plan(replace(request, memory_bytes=limit)) for limit in limits]
    seconds = [plan.cost.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    for plan, limit in zip(plans, limits, strict=True):
        assert plan.cost.memory_bytes <= limit


def test_a_memory_limit_that_no_plan_meets_is_refused_with_the_closest_plan() -> None:
    request = Request(cluster(2, 2), Workload(SHAPE, 2400), memory_bytes=1000)
    closest = min(all_plans(request), key=lambda plan: plan.cost.memory_bytes)
    with pytest.raises(ValueError) as refusal:
        best_plan(request)
    message, min_gib = str(refusal.value), closest.cost.memory_bytes / 2**30
    assert f"the closest, {scheme(closest, 4)}, needs {min_gib:.3g} GiB" in message
    assert "more ranks" in message


def test_the_closest_plan_is_named_for_all_ranks_where_some_stand_for_them() -> None:
    workload = Workload(SHAPE, 1 << 17, Mask(Band(1024, 0)), "contiguous")
    request = Request(cluster(16, 4), workload, memory_bytes=1000, degrees=(1,))
    assert representative(request).topology.size < 64
    with pytest.raises(ValueError, match="the closest, all-gather 64, needs"):
        plan_for(request)


def test_gathered_rows_are_kept_where_memory_allows() -> None:
    request = Request(cluster(4, 1, gbit=0.025), Workload(WIDE_SHAPE, 4096), degrees=(1,))
    may_keep = replace(request, keeps=(False, True), layers=8)
    gathers_again, keeps = best_plan(request), best_plan(may_keep)
    assert not gathers_again.choice.keep and keeps.choice.keep
    assert keeps.cost.seconds < gathers_again.cost.seconds
    assert keeps.choice.forward == keeps.choice.backward
    assert SequenceParallelConfig.from_dict(keeps.choice.to_config(4, "zigzag")).keep_gathered
    kept_bytes_of_8_layers = 8 * keeps.forward.gathered_bytes
    assert keeps.cost.memory_bytes > kept_bytes_of_8_layers > 0
    limited = replace(may_keep, memory_bytes=gathers_again.cost.memory_bytes)
    assert not best_plan(limited).choice.keep
    plans = all_plans(may_keep)
    assert plans[0] == keeps and any(not plan.choice.keep for plan in plans)


def test_a_forward_whose_keys_are_kept_gathers_the_keys_of_all_steps() -> None:
    """The backward finds also those keys that only a later step of the forward reads."""
    placed = read_placed({"name": "concentric", "team_size": 2, "order": [1, 0, 2]}, 8)
    split = HeadSplit(Workload(SHAPE, 8192, Mask(CAUSAL)), cluster(2, 4))
    kept, gathered_again = (
        pass_cost(split, place(placed, 8), replace(FORWARD, keep=keep)) for keep in (True, False)
    )
    request = Request(
        split.topology,
        split.workload,
        degrees=(1,),
        keeps=(True,),
        forward=(placed,),
        backward=(placed,),
    )
    assert best_plan(request).forward == kept
    assert kept.nic_bytes > gathered_again.nic_bytes
