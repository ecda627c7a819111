"""Routes as data: every pair meets once, the paper's placement, refusals, the printed grids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import schedules
from wf_backends.schedule.routes import (
    ROUTES,
    all_gather,
    concentric,
    double_ring,
    make_schedule,
    mesh,
    ring,
)
from wf_backends.schedule.schedule import Schedule, check, ranks_by_shard, render

GOLDEN = Path(__file__).parent / "golden"
EVERY = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 6, 8, 9, 12, 16, 25, 36, 64)
    for name, schedule in schedules(n).items()
]


@pytest.mark.parametrize("schedule", EVERY)
def test_every_pair_meets_once_whoever_walks(schedule: Schedule):
    assert check(schedule) is schedule
    turned = check(schedule.swapped())
    met, met_turned = set(), set()
    for route, pairs, order in ((schedule, met, 1), (turned, met_turned, -1)):
        for step, held in enumerate(route.holdings()):
            for r in range(route.num_ranks):
                pairs |= {(step, *(i, j)[::order]) for i in route.q[r] for j in held[r]}
    assert met == met_turned  # the same pairs at the same steps


def test_a_turned_schedule_is_right_where_hops_do_not_commute():
    swap, cycle = (1, 0, 2), (1, 2, 0)
    own = ((0,), (1,), (2,))
    odd = Schedule(own, own, (swap, tuple(swap[cycle[r]] for r in range(3))))
    turned = odd.swapped()
    there = {(r, o, s) for s, h in enumerate(odd.holdings()) for r in range(3) for o in h[r]}
    back = {(q, r, s) for s, h in enumerate(turned.holdings()) for r in range(3) for q in h[r]}
    assert there == back


@pytest.mark.parametrize(
    ("n", "team"), ((4, 2), (8, 2), (9, 3), (16, 2), (16, 4), (36, 3), (64, 4))
)
def test_concentric_is_the_papers_placement(n, team):
    """Appendix A.2, in its own words: who is sent a team's keys, and who comes next."""
    schedule, length = concentric(n, team), n // team**2
    for t in range(n // team):
        for a in range(team):
            receiver = (a * length + t // team) * team + t % team
            assert schedule.kv[receiver] == tuple(range(t * team, (t + 1) * team))
            following = ((t + 1) % length + length * (t // length)) * team + a
            assert all(hop[t * team + a] == following for hop in schedule.hops)
    assert len(schedule.hops) == length - 1


@pytest.mark.parametrize("schedule", EVERY)
def test_where_keys_are_follows_from_the_hops(schedule: Schedule):
    for one in (schedule, schedule.swapped()):
        ranks = tuple(range(one.num_ranks))
        places = [ranks]
        for hop in one.hops:
            places.append(tuple(hop[rank] for rank in places[-1]))
        for step, at in enumerate(places):
            assert tuple(one.holder(step, origin) for origin in ranks) == at
            assert tuple(one.origin(step, rank) for rank in at) == ranks


def test_hops_that_are_equal_are_no_laps() -> None:
    once = ring(3)
    again = Schedule(once.q, once.kv, tuple(tuple(list(hop)) for hop in once.hops))
    assert again.hops[0] is not again.hops[1]
    assert not again.has_laps


def test_who_names_a_shard() -> None:
    assert ranks_by_shard(((0, 1), (1, 2), (2,))) == [[0], [0, 1], [1, 2]]
    assert ranks_by_shard(((0, 1), (0, 1))) == [[0, 1], [0, 1]]
    assert ranks_by_shard(((), (1,))) == [[], [1]]


def test_named_points_coincide_where_they_should():
    assert mesh(1, 6) == ring(6)
    assert concentric(6, 1).q == ring(6).q
    assert double_ring(6, 6).hops == ring(6).hops
    assert double_ring(6, 1).hops == ring(6).hops
    assert all_gather(4).num_steps == 1


def test_double_ring_jumps_between_nodes_only_between_laps():
    crossing = [any(r // 4 != hop[r] // 4 for r in range(12)) for hop in double_ring(12, 4).hops]
    assert crossing == [False] * 3 + ([True] + [False] * 3) * 2


def test_check_names_pairs_that_do_not_meet_once():
    dropped = replace(ring(4), hops=ring(4).hops[:-1])
    with pytest.raises(ValueError, match=r"4 do not, as \(query, key, times\): \[\(0, 3, 0\)"):
        check(dropped)
    doubled = replace(ring(4), hops=(*ring(4).hops, ring(4).hops[0]))
    with pytest.raises(ValueError, match=r"\(0, 0, 2\)"):
        check(doubled)


def test_check_refuses_a_hop_that_is_no_permutation():
    with pytest.raises(ValueError, match=r"permutation of the 2 ranks, got \(1, 1\)"):
        check(replace(ring(2), hops=((1, 1),)))


@pytest.mark.parametrize(
    ("words", "says"),
    (
        ({"name": "concentric", "team_size": 2}, "team_size must have a square that divides the 6"),
        ({"name": "double_ring", "inner": 4}, "inner must divide the 6 ranks of the route, got 4"),
        ({"name": "mesh", "rows": 2, "cols": 2}, r"multiply to the 6 ranks.*got \(2, 2\)"),
        ({"name": "mesh", "rows": 2}, "'mesh' needs 'cols', a positive integer, got None"),
        ({"name": "mesh", "rows": -2, "cols": -3}, "needs 'rows', a positive integer, got -2"),
        ({"name": "concentric", "team": 2}, "got 'team'; did you mean 'team_size'"),
        ({"name": "ring", "inner": 2}, "'ring' takes no other key, got 'inner'"),
        ({"name": "concentrik"}, "got 'concentrik'; did you mean 'concentric'"),
        ({}, "route name must be one of"),
    ),
)
def test_a_route_that_does_not_fit_is_refused(words, says):
    with pytest.raises(ValueError, match=says):
        make_schedule(words, 6)


def test_every_route_can_be_made_from_words():
    words = {
        "double_ring": {"inner": 2},
        "concentric": {"team_size": 2},
        "mesh": {"rows": 2, "cols": 4},
    }
    for name in ROUTES:
        schedule = check(make_schedule({"name": name, **words.get(name, {})}, 8))
        assert schedule.num_ranks == 8


@pytest.mark.parametrize(
    ("name", "schedule"),
    (("ring_4", ring(4)), ("concentric_8_2", concentric(8, 2)), ("mesh_2x4", mesh(2, 4))),
)
def test_the_printed_grid(name, schedule, request):
    assert render(schedule) + "\n" == (GOLDEN / f"{name}.txt").read_text()
