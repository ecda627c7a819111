"""Schedules as data: every pair of shards meets once, the paper's placement, refusals, grids."""

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
ALL_SCHEDULES = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 6, 8, 9, 12, 16, 25, 36, 64)
    for name, schedule in schedules(n).items()
]
OWN_SHARDS = ((0,), (1,), (2,))


def meetings(schedule: Schedule) -> set[tuple[int, int, int]]:
    """(step, shard that stays, shard that walks) of all pairs of shards that meet."""
    return {
        (step, stay, walk)
        for step, held in enumerate(schedule.holdings())
        for rank in range(schedule.num_ranks)
        for stay in schedule.q[rank]
        for walk in held[rank]
    }


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_every_pair_meets_once_whether_keys_or_queries_walk(schedule: Schedule):
    assert check(schedule) is schedule
    swapped = check(schedule.swapped())
    assert meetings(swapped) == {(step, k, q) for step, q, k in meetings(schedule)}


def test_swapped_keeps_all_meetings_where_hops_do_not_commute():
    swap, cycle = (1, 0, 2), (1, 2, 0)
    hops = swap, tuple(swap[cycle[rank]] for rank in range(3))
    schedule = Schedule(OWN_SHARDS, OWN_SHARDS, hops)
    assert meetings(schedule.swapped()) == {(step, k, q) for step, q, k in meetings(schedule)}


@pytest.mark.parametrize(
    ("n", "team_size"), ((4, 2), (8, 2), (9, 3), (16, 2), (16, 4), (36, 3), (64, 4))
)
def test_concentric_is_the_papers_placement(n, team_size):
    """Appendix A.2: which rank is sent a team's keys, and which rank comes next on its ring.

    t is the team of a rank, a the rank's number in it.
    """
    schedule, length = concentric(n, team_size), n // team_size**2
    for t in range(n // team_size):
        for a in range(team_size):
            receiver = (a * length + t // team_size) * team_size + t % team_size
            assert schedule.kv[receiver] == tuple(range(t * team_size, (t + 1) * team_size))
            following = ((t + 1) % length + length * (t // length)) * team_size + a
            assert all(hop[t * team_size + a] == following for hop in schedule.hops)
    assert len(schedule.hops) == length - 1


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_holder_and_origin_follow_the_hops(schedule: Schedule):
    for walking in (schedule, schedule.swapped()):
        ranks = tuple(range(walking.num_ranks))
        holders = [ranks]  # [step][origin]
        for hop in walking.hops:
            holders.append(tuple(hop[rank] for rank in holders[-1]))
        for step, expected in enumerate(holders):
            assert tuple(walking.holders[step][origin] for origin in ranks) == expected
            assert tuple(walking.origins[step][rank] for rank in expected) == ranks


def test_ranks_by_shard_lists_the_ranks_that_hold_a_shard() -> None:
    assert ranks_by_shard(((0, 1), (1, 2), (2,))) == [[0], [0, 1], [1, 2]]
    assert ranks_by_shard(((0, 1), (0, 1))) == [[0, 1], [0, 1]]
    assert ranks_by_shard(((), (1,))) == [[], [1]]


def test_degenerate_routes_are_rings():
    assert mesh(6, 1, 6) == ring(6)
    assert concentric(6, 1).q == ring(6).q
    assert double_ring(6, 6).hops == ring(6).hops
    assert double_ring(6, 1).hops == ring(6).hops


def test_an_all_gather_has_one_step():
    assert all_gather(4).num_steps == 1


def test_a_double_ring_crosses_hosts_only_between_laps():
    """Three hosts of four ranks: three hops inside each, then one between them."""
    crosses = [any(r // 4 != hop[r] // 4 for r in range(12)) for hop in double_ring(12, 4).hops]
    assert crosses == [False] * 3 + ([True] + [False] * 3) * 2


def test_check_names_pairs_that_do_not_meet_once():
    a_hop_too_few = replace(ring(4), hops=ring(4).hops[:-1])
    with pytest.raises(ValueError, match=r"4 do not, as \(query, key, times\): \[\(0, 3, 0\)"):
        check(a_hop_too_few)
    a_hop_too_many = replace(ring(4), hops=(*ring(4).hops, ring(4).hops[0]))
    with pytest.raises(ValueError, match=r"\(0, 0, 2\)"):
        check(a_hop_too_many)


def test_check_refuses_a_hop_that_is_no_permutation():
    with pytest.raises(ValueError, match=r"permutation of the 2 ranks, got \(1, 1\)"):
        check(replace(ring(2), hops=((1, 1),)))


@pytest.mark.parametrize(
    ("route", "message"),
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
def test_a_route_that_does_not_fit_is_refused(route, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(route, 6)


@pytest.mark.parametrize("name", ROUTES)
def test_a_config_can_name_every_route(name):
    keys = {
        "double_ring": {"inner": 2},
        "concentric": {"team_size": 2},
        "mesh": {"rows": 2, "cols": 4},
    }
    schedule = check(make_schedule({"name": name, **keys.get(name, {})}, 8))
    assert schedule.num_ranks == 8


@pytest.mark.parametrize(
    ("name", "schedule"),
    (("ring_4", ring(4)), ("concentric_8_2", concentric(8, 2)), ("mesh_2x4", mesh(8, 2, 4))),
)
def test_render_prints_the_grid_of_the_golden_file(name, schedule):
    assert render(schedule) + "\n" == (GOLDEN / f"{name}.txt").read_text()
