"""Placements: a schedule with its ranks renumbered is valid, a config can name every placement,
and each route is listed once, by its simplest name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import SHAPE, cluster
from wf_backends.cost.route_shape import shape_of
from wf_backends.cost.workload import HeadSplit, Workload
from wf_backends.schedule.placement import (
    Placed,
    default_placement,
    digits,
    divisors,
    permutation,
    place,
    placements,
    read_placed,
    relabel,
    routes,
)
from wf_backends.schedule.routes import concentric, make_schedule, mesh
from wf_backends.schedule.schedule import check


@pytest.mark.parametrize("size", range(1, 17))
def test_every_placement_is_a_valid_schedule(size: int) -> None:
    for placed in placements(size):
        check(place(placed, size))


def test_rank_order_is_the_route_itself() -> None:
    for placed in placements(16):
        if placed.in_rank_order:
            assert place(placed, 16) == make_schedule(placed.route, 16)


def test_a_placement_gives_each_part_to_one_rank() -> None:
    for placed in placements(16):
        assert sorted(permutation(placed, 16)) == list(range(16))


def test_all_orders_of_the_digits_give_different_schedules() -> None:
    """The concentric route with teams of 2 on 8 ranks has three digits."""
    schedules = [place(p, 8) for p in placements(8) if p.route["name"] == "concentric"]
    assert len(set(schedules)) == len(schedules) == 6


def test_the_order_of_the_digits_decides_which_ranks_are_neighbours() -> None:
    rows_apart = Placed((("cols", 4), ("name", "mesh"), ("rows", 2)), (1, 0))
    assert place(rows_apart, 8).q[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert place(rows_apart, 8).hops[0] == (3, 0, 1, 2, 7, 4, 5, 6)
    assert str(rows_apart) == "mesh cols=4 rows=2, digits 1-0"


@pytest.mark.parametrize("size", (1, 4, 8, 12, 16))
def test_every_placement_can_be_written_and_read(size: int) -> None:
    for placed in placements(size):
        assert read_placed(placed.to_dict(), size) == placed


def test_defaults_of_a_placement_are_not_written() -> None:
    route = {"name": "concentric", "team_size": 2, "order": [0, 1, 2]}
    assert read_placed(route, 8).to_dict() == {"name": "concentric", "team_size": 2}


def test_the_order_of_the_digits_may_be_a_tuple() -> None:
    route = {"name": "concentric", "team_size": 2, "order": (2, 0, 1)}
    assert read_placed(route, 8).order == (2, 0, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"order": [0, 0]}, "here 0 = column \\(of 4\\), 1 = row \\(of 2\\); got \\[0, 0\\]"),
        ({"order": [1]}, "must list every digit of route 'mesh' once.*got \\[1\\]"),
        ({"order": [0, 1, 2]}, "must list every digit"),
        ({"order": [True, 0]}, "must list every digit"),
        ({"order": ["1", "0"]}, "got \\['1', '0'\\]"),
        ({"order": "10"}, "got '10'"),
        ({"order": None}, "got None"),
        ({"ordr": [1, 0]}, "got 'ordr'; did you mean 'order'"),
        ({"rows": 3}, "multiply to"),
        ({"host_size": 0}, "host_size must be a positive integer.*got 0"),
        ({"host_size": True}, "host_size must be a positive integer.*got True"),
        ({"host_size": "4"}, "got '4'"),
        ({"hostsize": 4}, "got 'hostsize'; did you mean 'host_size'"),
    ),
)
def test_a_malformed_placement_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_placed({"name": "mesh", "rows": 2, "cols": 4, **keys}, 8)


def test_host_size_is_read_and_written() -> None:
    route = {"name": "all_gather", "host_size": 4}
    placed = read_placed(route, 8)
    assert placed.host_size == 4
    assert placed.to_dict() == route
    assert str(placed) == "all_gather, once to hosts of 4"
    assert read_placed({"name": "ring", "host_size": 1}, 8).to_dict() == {"name": "ring"}


@pytest.mark.parametrize("route", ({"name": "ring"}, {"name": "double_ring", "inner": 2}))
def test_host_size_is_refused_on_routes_that_gather_nothing(route: dict) -> None:
    with pytest.raises(ValueError, match="host_size 4 is for routes that gather rows.*leave"):
        read_placed({**route, "host_size": 4}, 8)


@given(st.permutations(range(8)))
def test_relabel_renumbers_ranks_and_shards_and_can_be_undone(permuted: list[int]) -> None:
    ranks = tuple(permuted)
    inverse = tuple(ranks.index(rank) for rank in range(8))
    for schedule in (concentric(8, 2), mesh(8, 2, 4)):
        relabelled = check(relabel(schedule, ranks))
        shards_of_rank_3 = schedule.holdings()[1][3]
        expected = tuple(sorted(ranks[shard] for shard in shards_of_rank_3))
        assert relabelled.holdings()[1][ranks[3]] == expected
        assert relabel(relabelled, inverse) == schedule


def test_routes_lists_every_divisor_as_mesh_team_and_double_ring() -> None:
    routes_of_16 = routes(16)
    assert [r["team_size"] for r in routes_of_16 if r["name"] == "concentric"] == [2, 4]
    assert [r["inner"] for r in routes_of_16 if r["name"] == "double_ring"] == [2, 4, 8]
    meshes = [(r["rows"], r["cols"]) for r in routes_of_16 if r["name"] == "mesh"]
    assert meshes == [(2, 8), (4, 4), (8, 2), (16, 1)]
    assert [len(digits(route, 16)) for route in routes_of_16[:2]] == [1, 1]


@pytest.mark.parametrize("route", routes(16), ids=lambda route: str(default_placement(route, 16)))
def test_shape_of_a_route_agrees_with_its_schedule(route: dict) -> None:
    split = HeadSplit(Workload(SHAPE, 1024), cluster(4, 4))
    shape, schedule = shape_of(default_placement(route, 16), split), make_schedule(route, 16)
    gathers = shape.queries.foreign > 0, shape.keys.foreign > 0
    assert gathers == schedule.gathers()
    assert shape.num_hops == len(schedule.hops)


def test_a_route_without_a_shape_is_refused() -> None:
    placed = default_placement({"name": "spiral"}, 4)
    with pytest.raises(NotImplementedError, match="'spiral' has no shape"):
        shape_of(placed, HeadSplit(Workload(SHAPE, 64), cluster(1, 4)))


def test_divisors_are_all_and_rising() -> None:
    assert [divisors(n) for n in (1, 12, 16)] == [[1], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]
