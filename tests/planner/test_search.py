"""The search: it finds the best of all plans, whatever it leaves out, and every plan can run."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning import MASKS, SHAPE, cluster
from wf_backends.cluster.presets import PRESETS, one_host
from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import named_choice, request_of
from wf_backends.planner.plan import TIE, Choice, Request, rounded
from wf_backends.planner.search import all_plans, best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import (
    default_placement,
    divisors,
    place,
    placements,
    read_placed,
)
from wf_backends.schedule.schedule import check

DOCUMENTS = Mask(CAUSAL, (0, 90, 100, 500, 720, 1000, 1024))


def drawn_requests(count: int, seed: int) -> list[Request]:
    """Requests of 2 to 8 ranks, whose plans are counted message by message."""
    source, requests = random.Random(seed), list[Request]()
    while len(requests) < count:
        size, seqlen = source.choice([2, 3, 4, 6, 8]), source.choice([1024, 4096])
        heads = source.choice([(8, 8), (8, 2), (6, 3), (4, 4)])
        mask = source.choice([Mask(), Mask(CAUSAL), Mask(Band(seqlen // 8, 0)), DOCUMENTS])
        layout = "zigzag" if mask is DOCUMENTS else source.choice(["zigzag", "contiguous"])
        seqlen = 1024 if mask is DOCUMENTS else seqlen
        hosts = source.choice(divisors(size))
        topology = cluster(hosts, size // hosts, gbit=source.choice([0.005, 0.02, 0.06, 1, 100]))
        topology = replace(topology, occupied=source.choice([0.0, 0.5]))
        shape = replace(SHAPE, heads=heads[0], kv_heads=heads[1])
        keeps = source.choice([(False,), (False, True)])
        requests.append(Request(topology, Workload(shape, seqlen, mask, layout), keeps=keeps))
    return requests


def request_id(request: Request) -> str:
    topology, workload = request.topology, request.workload
    heads = f"heads={workload.shape.heads}, kv_heads={workload.shape.kv_heads}"
    ranks = f"{topology.hosts} x {topology.ranks_per_host} ranks"
    return f"{ranks}, {topology.between.bytes_per_s * 8e-9:g} Gbit/s, {heads}, {workload.mask}"


REQUESTS = [*drawn_requests(16, seed=0), drawn_requests(7, seed=1)[-1]]
"""The last one is drawn for this: the best plan is not one of the head split that closed forms put
first."""


@pytest.mark.parametrize("request_", REQUESTS, ids=request_id)
def test_the_search_finds_the_best_of_all_plans(request_: Request) -> None:
    """Although it leaves out most head splits, by closed forms. Times may be one tie apart."""
    plans = all_plans(request_)
    assert best_plan(request_) == plans[0]
    seconds = [plan.cost.seconds for plan in plans]
    assert seconds == pytest.approx(sorted(seconds), rel=TIE + 0.01)
    assert seconds[0] <= (1 + TIE) * min(seconds)
    limited = replace(request_, memory_bytes=min(plan.cost.memory_bytes for plan in plans))
    assert best_plan(limited).cost.memory_bytes <= limited.memory_limit


@settings(max_examples=30, deadline=None)
@given(
    hosts=st.sampled_from([(32, 1, 1), (16, 2, 1), (8, 4, 2), (4, 8, 8), (1, 32, 1)]),
    mask=st.sampled_from(MASKS),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    heads=st.sampled_from([(8, 8), (8, 2), (6, 3)]),
    gbit=st.floats(0.001, 1000),
    direct_links=st.booleans(),
)
def test_a_search_in_closed_forms_finds_the_best_of_all_plans(
    hosts: tuple[int, int, int],
    mask: Mask,
    layout: str,
    heads: tuple[int, int],
    gbit: float,
    direct_links: bool,
) -> None:
    shape = replace(SHAPE, heads=heads[0], kv_heads=heads[1])
    topology = replace(cluster(*hosts, gbit=gbit), direct_links=direct_links)
    request = Request(topology, Workload(shape, 4096, mask, layout))
    assert best_plan(request) == all_plans(request)[0]


def test_all_plans_have_every_degree_and_every_route() -> None:
    """On 2 x 2 ranks: degrees 1, 2 and 4; degree 2 also with ranks that are 2 apart."""
    plans_of_all_strides = all_plans(Request(cluster(2, 2), Workload(SHAPE, 240)))
    plans = [plan for plan in plans_of_all_strides if plan.choice.stride == 1]
    pairs = [(p.choice.degree, p.choice.forward, p.choice.backward, p.choice.moves) for p in plans]
    assert len(set(pairs)) == len(pairs)
    forwards = {(plan.choice.degree, str(plan.choice.forward)) for plan in plans}
    assert {degree for degree, _ in forwards} == {1, 2, 4}
    assert len(forwards) >= len(plans) - 3  # each degree may have a second, faster backward
    for route in ("ring", "all_gather", "double_ring inner=2", "mesh cols=2 rows=2"):
        assert (1, route) in forwards
    teams = [route for degree, route in forwards if degree == 1 and route.startswith("concentric")]
    assert len(teams) == 2  # sub-rings of one rank: only two digits can change places
    assert (2, "mesh cols=1 rows=2") in forwards
    plans_of_stride_2 = [plan for plan in plans_of_all_strides if plan.choice.stride == 2]
    assert {(p.choice.degree, str(p.choice.forward)) for p in plans_of_stride_2} == {
        (degree, route) for degree, route in forwards if degree == 2
    }


def test_in_closed_form_the_first_route_of_each_shape_is_a_candidate() -> None:
    """On one host the order of the digits does not change the shape."""
    plans = all_plans(Request(cluster(1, 16), Workload(SHAPE, 2400), degrees=(1,)))
    routes = {plan.choice.forward for plan in plans}
    assert all(placed.in_rank_order for placed in routes)
    assert len(routes) == len({placed.fields for placed in placements(16)})


def test_in_closed_form_a_named_order_of_digits_is_kept() -> None:
    mesh = read_placed({"name": "mesh", "rows": 4, "cols": 4, "order": [1, 0]}, 16)
    request = Request(cluster(1, 16), Workload(SHAPE, 2400), degrees=(1,), forward=(mesh,))
    assert {plan.choice.forward for plan in all_plans(request)} == {mesh}


def test_every_plan_has_valid_schedules_and_a_config_that_chooses_it() -> None:
    for plan in all_plans(Request(cluster(2, 4), Workload(SHAPE, 240, Mask(CAUSAL)))):
        for placed in (plan.choice.forward, plan.choice.backward):
            check(place(placed, 8 // plan.choice.degree))
        options = json.loads(json.dumps(plan.choice.to_config(8, "zigzag")))
        config = SequenceParallelConfig.from_dict(options)
        assert not config.leaves_open
        request = request_of(config, SHAPE, 240, Mask(CAUSAL))
        assert named_choice(request) == plan.choice


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_better_links_and_faster_kernels_never_slow_a_plan(mask: Mask) -> None:
    topology = cluster(2, 4)
    better = {
        "bandwidth between hosts": {"between": Link(1e-4, 1e10)},
        "latency between hosts": {"between": Link(1e-6, 1e9 / 8)},
        "links inside hosts": {"inside": Link(1e-7, 1e11)},
        "NICs": {"nics_per_host": 4},
        "kernels": {"kernels": (("sdpa", KernelRate(4e10, 8e10, 1e-5)),)},
    }

    def fastest_s(topology: Topology) -> float:
        """Rounded as the planner compares times: of plans equally fast it may take a slower one."""
        plans = all_plans(Request(topology, Workload(SHAPE, 2400, mask)))
        return rounded(min(plan.cost.seconds for plan in plans))

    seconds = fastest_s(topology)
    for name, changes in better.items():
        assert fastest_s(replace(topology, **changes)) <= seconds, name
    slower_links = replace(topology, between=Link(1e-3, 1e9 / 80))
    assert fastest_s(slower_links) > seconds


def test_one_key_head_on_slow_links_takes_no_ring() -> None:
    """8 hosts of one rank and one query head: gathering two shards of keys sends less."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_dim=64, itemsize=4)
    request = Request(cluster(8, 1, gbit=0.025), Workload(shape, 8192))
    plan, ring = best_plan(request), default_placement({"name": "ring"}, 8)
    ring_plan = price_plan(request, Choice(1, ring, ring))
    assert plan.choice.forward.route["name"] != "ring"
    assert plan.cost.nic_bytes < ring_plan.cost.nic_bytes
    assert plan.cost.seconds < ring_plan.cost.seconds


def test_the_fewest_bytes_win_where_tiles_hide_all_messages() -> None:
    shape = Shape(batch=1, heads=4, kv_heads=1, head_dim=64, itemsize=4)
    request = Request(cluster(8, 1, gbit=10_000), Workload(shape, 65536), degrees=(1,))
    plan, ring = best_plan(request), default_placement({"name": "ring"}, 8)
    assert plan.choice.in_rank_order and plan.choice.moves == "keys"
    assert plan.cost.exposed_s < 0.01 * plan.cost.compute_s
    ring_plan = price_plan(request, Choice(1, ring, ring))
    assert plan.cost.seconds == pytest.approx(ring_plan.cost.seconds, rel=0.01)
    assert plan.cost.nic_bytes < ring_plan.cost.nic_bytes


def test_of_plans_that_are_equally_fast_the_one_that_sends_less_wins() -> None:
    """4 ranks of one host: a ring is predicted 0.6 % faster than Ulysses and sends far more."""
    shape = Shape(batch=1, heads=32, kv_heads=32, head_dim=128, itemsize=2)
    topology = PRESETS["h100-8x400g"].with_ranks(4)
    request = Request(topology, Workload(shape, 131072, Mask(CAUSAL)))
    plans = all_plans(request)
    best, fastest = plans[0], min(plans, key=lambda plan: plan.cost.seconds)
    assert (best.choice.degree, fastest.choice.degree) == (4, 1)
    assert best.cost.inside_bytes < 0.7 * fastest.cost.inside_bytes
    assert best == best_plan(request)


@pytest.mark.parametrize("seqlen", (128, 512))
@pytest.mark.parametrize("size", (4, 8))
def test_few_tokens_on_cores_are_not_traded_among_all_ranks(size: int, seqlen: int) -> None:
    """The exchange has many small messages: by `benchmarks/peers.py` it takes 1.6 x the CPU time of
    the best scheme at 128 tokens, in two chunks 2.4 x."""
    shape = Shape(batch=1, heads=8, kv_heads=8, head_dim=64, itemsize=4)
    plan = best_plan(Request(one_host(size), Workload(shape, seqlen, Mask(CAUSAL))))
    assert plan.choice.degree < size and plan.choice.chunks == 1


def test_a_plan_for_4096_ranks_takes_less_than_a_second() -> None:
    """Typically less than 0.1 s; the bound is for slow machines."""
    topology = PRESETS["h100-8x400g"].with_ranks(4096)
    shape = Shape(batch=1, heads=32, kv_heads=8, head_dim=128, itemsize=2)
    request = Request(topology, Workload(shape, 1 << 22, Mask(CAUSAL)))
    start = time.process_time()
    plan = best_plan(request)
    assert time.process_time() - start < 1.0
    assert plan == best_plan(request)


def test_equal_requests_give_equal_plans_in_equal_order() -> None:
    request = Request(cluster(2, 2), Workload(SHAPE, 240, Mask(CAUSAL)))
    assert repr(all_plans(request)) == repr(all_plans(request))
