"""What an attention call runs: what its config names, and what is chosen for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.planning import MASKS, SHAPE, cluster
from wf_backends.cluster.presets import PRESETS
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import choose, request_of
from wf_backends.planner.plan import EXACT_UP_TO, Request, ranked
from wf_backends.planner.proxy import on_few_routes, on_fewer_ranks
from wf_backends.planner.search import best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import place
from wf_backends.schedule.schedule import check


def config(**words: object) -> SequenceParallelConfig:
    return SequenceParallelConfig.from_dict({"sequence_parallel_size": 8, **words})


@pytest.mark.parametrize("size", [4, 16, 128])
@pytest.mark.parametrize("left", [239, 240, 10**30])
def test_a_window_over_the_whole_sequence_is_none(size: int, left: int) -> None:
    config = SequenceParallelConfig(sequence_parallel_size=size, route="auto")
    topology = cluster(size // 4, 4)
    plain = plan_for(request_of(config, SHAPE, 240, Mask(CAUSAL), topology))
    assert plan_for(request_of(config, SHAPE, 240, Mask(Band(left, 0)), topology)) == plain
    documents = (0, 200, 240)
    packed = plan_for(request_of(config, SHAPE, 240, Mask(CAUSAL, documents), topology))
    assert (
        plan_for(request_of(config, SHAPE, 240, Mask(Band(left - 40, 0), documents), topology))
        == packed
    )


def test_a_window_that_hides_something_is_one() -> None:
    assert Mask(Band(238, 0)).within(240) == Mask(Band(238, 0))
    assert Mask(Band(239, 5)).within(240) == Mask(Band(right=5))


def test_a_call_keeps_as_many_layers_as_fit() -> None:
    shape = Shape(batch=1, heads=4, kv_heads=4, head_dim=64, itemsize=4)
    links = cluster(2, 2, gbit=0.025)
    words = {"sequence_parallel_size": 4, "ulysses_degree": 1, "keep_gathered": "auto"}
    one = plan_for(request_of(config(**words), shape, 8192, Mask(), links))
    room = replace(links, memory_bytes=one.cost.memory_bytes + 3 * one.forward.gathered_bytes)
    keeps = [
        plan_for(
            request_of(config(**words, kept_layers=layers), shape, 8192, Mask(), room)
        ).choice.keep
        for layers in (1, 4, 64)
    ]
    assert one.choice.keep and keeps == [True, True, False]


def test_a_call_keeps_what_the_config_names() -> None:
    named = config(route={"name": "concentric", "team_size": 2}, backward_moves="queries")
    plan = plan_for(request_of(named, SHAPE, 240, Mask()))
    for one in (plan.choice.forward, plan.choice.backward):
        assert one.route == {"name": "concentric", "team_size": 2}
        assert one.in_rank_order
    assert plan.choice.moves == "queries"
    placed = {"name": "concentric", "team_size": 2, "order": [2, 0, 1], "reverse": True}
    plan = plan_for(request_of(config(route=placed), SHAPE, 240, Mask()))
    assert plan.choice.forward == plan.choice.backward
    assert plan.choice.forward.to_words() == placed
    half = plan_for(request_of(config(route="ring", backward_route="auto"), SHAPE, 240, Mask()))
    assert half.choice.forward.route == {"name": "ring"}


def test_a_call_chooses_what_the_config_leaves_open() -> None:
    plan = plan_for(
        request_of(config(ulysses_degree=2, backward_moves="keys"), SHAPE, 240, Mask(CAUSAL))
    )
    assert plan.choice.degree == 2 and plan.choice.moves == "keys"
    check(place(plan.choice.forward, 4))
    slow = cluster(8, 1, gbit=0.001)
    alone = replace(SHAPE, heads=1, kv_heads=1, itemsize=4)
    assert (
        plan_for(request_of(config(), alone, 8192, Mask(), slow)).choice.forward.route["name"]
        != "ring"
    )


@settings(max_examples=15)
@given(
    size=st.sampled_from([1, 2, 4, 6, 8, 12, 64]),
    heads=st.sampled_from([(8, 8), (8, 2), (6, 3), (12, 1), (1, 1)]),
    gbit=st.floats(0.001, 100),
    mask=st.sampled_from(MASKS),
)
@example(size=64, heads=(1, 1), gbit=15.0, mask=Mask(Band(30, 0)))  # rows once in one pass alone
def test_a_size_alone_gives_the_best_of_all(
    size: int, heads: tuple[int, int], gbit: float, mask: Mask
) -> None:
    shape = replace(SHAPE, heads=heads[0], kv_heads=heads[1])
    topology = cluster(1, size) if size < 4 else cluster(size // 2, 2, gbit=gbit)
    alone = SequenceParallelConfig(sequence_parallel_size=size)
    plan = plan_for(request_of(alone, shape, 2048, mask, topology))
    request = Request(topology, Workload(shape, 2048, mask))
    best = best_plan(request)
    if mask.is_near and size > EXACT_UP_TO:  # counted, and not by closed forms
        by_forms, counted = (price_plan(on_few_routes(request), one.choice) for one in (best, plan))
        assert counted.cost.seconds <= 1.02 * by_forms.cost.seconds
        if on_fewer_ranks(request) is None:
            both = ranked([by_forms, plan], request)
            assert plan == counted == both[0]
    else:
        assert plan == best
    asked = request_of(alone, shape, 2048, mask, topology)
    assert choose(alone, asked, lambda *told: None) == plan.choice
    said = SequenceParallelConfig.from_dict(plan.choice.to_config(size, "zigzag"))
    assert not said.leaves_open
    assert choose(said, request_of(said, shape, 2048, mask), pytest.fail) == plan.choice


def test_auto_degrees_keep_to_what_heads_and_named_routes_allow() -> None:
    fast = cluster(4, 2, gbit=0.01)
    many = replace(SHAPE, heads=8, kv_heads=8)
    at_once = config(ulysses_chunks=1, ulysses_stride=1)
    assert plan_for(request_of(at_once, many, 8192, Mask(), fast)).choice.degree == 8
    six = replace(SHAPE, heads=6, kv_heads=6)  # of 8 ranks only 1 and 2 divide them
    assert plan_for(request_of(config(), six, 8192, Mask(), fast)).choice.degree == 2
    teams = config(route={"name": "concentric", "team_size": 2}, ulysses_degree="auto")
    plan = plan_for(request_of(teams, many, 8192, Mask(), fast))
    assert plan.choice.degree == 2 and plan.choice.forward.route["team_size"] == 2
    mesh = config(route={"name": "mesh", "rows": 2, "cols": 1}, ulysses_degree="auto")
    with pytest.raises(ValueError, match=r"no ulysses_degree of \(4,\) divides.*6 heads"):
        plan_for(request_of(mesh, six, 240, Mask()))


def test_cross_attention_moves_the_shorter_side() -> None:
    """Many queries and few keys: a plan for as many keys would bring queries together."""
    slow, shape = cluster(8, 1, gbit=0.025), Shape(1, 1, 1, 64, itemsize=2)

    def gathers_queries(keys: int | None) -> list[bool]:
        plan = plan_for(request_of(config(), shape, 65536, Mask(), slow, keys))
        return [schedule.gathers()[0] for schedule in plan.choice.schedules(8)]

    assert gathers_queries(None) == [True, True]
    assert gathers_queries(128) == [False, False]


def test_queries_walk_back_where_that_is_faster() -> None:
    """A mesh of one column has no hops with keys walking; a named side stays the side."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_dim=64, itemsize=2)
    links = cluster(8, 1, gbit=0.05)
    plans = {
        moves: plan_for(request_of(config(backward_moves=moves), shape, 8192, Mask(), links))
        for moves in ("keys", "queries", "auto")
    }
    assert plans["keys"].choice.moves == "keys" and plans["queries"].choice.moves == "queries"
    best = min(plans["keys"].cost.seconds, plans["queries"].cost.seconds)
    assert plans["auto"].cost.seconds == pytest.approx(best, rel=0.01)


def test_lengths_that_differ_little_are_planned_as_one() -> None:
    lengths = (8192, 8193, 9000, 9216)
    plans = [plan_for(request_of(config(), SHAPE, length, Mask(CAUSAL))) for length in lengths]
    assert plans[0] != plans[1] == plans[2] == plans[3]
    assert all(plan_for(request_of(config(), SHAPE, n, Mask())).cost.seconds for n in (16, 17, 31))


def test_a_call_chooses_the_same_for_every_batch_of_documents() -> None:
    plans = [
        plan_for(request_of(config(), SHAPE, 240, Mask(CAUSAL, borders)))
        for borders in (None, (0, 240), (0, 10, 240))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_a_call_on_part_of_a_cluster() -> None:
    plan = plan_for(request_of(config(), SHAPE, 240, Mask(), cluster(8, 4)))
    assert plan == plan_for(request_of(config(), SHAPE, 240, Mask(), cluster(2, 4)))


def test_a_call_on_hosts_nobody_described_is_never_short_of_memory() -> None:
    plan = plan_for(
        request_of(config(), replace(SHAPE, heads=64, head_dim=256), 1 << 24, Mask(CAUSAL))
    )
    assert plan.cost.memory_bytes > PRESETS["one-host"].memory_bytes
