"""Renumbered schedules are schedules; every route is found once, by its simplest name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import SHAPE, both_ways, cluster
from wf_backends.cost.route_shape import shape_of
from wf_backends.cost.workload import HeadSplit, Workload
from wf_backends.schedule.placement import (
    Placed,
    digits,
    divisors,
    in_rank_order,
    permutation,
    place,
    placements,
    read_placed,
    relabel,
    routes,
)
from wf_backends.schedule.routes import concentric, make_schedule, mesh, ring
from wf_backends.schedule.schedule import check


@pytest.mark.parametrize("size", range(1, 17))
def test_every_placement_is_a_schedule(size: int) -> None:
    for placed in both_ways(size):
        check(place(placed, size))


def test_rank_order_is_the_route_itself() -> None:
    for placed in placements(16):
        if placed.in_rank_order:
            assert place(placed, 16) == make_schedule(placed.route, 16)
        assert sorted(permutation(placed, 16)) == list(range(16))


def test_placements_differ() -> None:
    schedules = [place(placed, 8) for placed in placements(8)]
    teams = [s for s in schedules if s.num_steps == 2 and len(s.q[0]) == 2]
    assert len(set(teams)) == len(teams) == 6


def test_digits_in_another_order_put_other_ranks_side_by_side() -> None:
    rows_apart = Placed((("cols", 4), ("name", "mesh"), ("rows", 2)), (1, 0))
    assert place(rows_apart, 8).q[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert place(rows_apart, 8).hops[0] == (3, 0, 1, 2, 7, 4, 5, 6)
    assert str(rows_apart) == "mesh cols=4 rows=2, digits 1-0"


def test_a_ring_backwards_walks_the_other_way() -> None:
    backwards = Placed((("name", "ring"),), (0,), reverse=True)
    assert place(backwards, 4).hops[0] == (1, 2, 3, 0)
    assert ring(4).hops[0] == (3, 0, 1, 2)
    assert not backwards.in_rank_order


@pytest.mark.parametrize("size", (1, 4, 8, 12, 16))
def test_every_placement_can_be_said_in_words(size: int) -> None:
    for placed in both_ways(size):
        assert read_placed(placed.to_words(), size) == placed


def test_rank_order_goes_without_saying() -> None:
    said = {"name": "concentric", "team_size": 2, "order": [0, 1, 2], "reverse": False}
    assert read_placed(said, 8).to_words() == {"name": "concentric", "team_size": 2}
    assert read_placed({**said, "order": (2, 0, 1)}, 8).order == (2, 0, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    (
        ({"order": [0, 0]}, "here 0 = column \\(of 4\\), 1 = row \\(of 2\\); got \\[0, 0\\]"),
        ({"order": [1]}, "must list every digit of route 'mesh' once.*got \\[1\\]"),
        ({"order": [0, 1, 2]}, "must list every digit"),
        ({"order": [True, 0]}, "must list every digit"),
        ({"order": ["1", "0"]}, "got \\['1', '0'\\]"),
        ({"order": "10"}, "got '10'"),
        ({"order": None}, "got None"),
        ({"reverse": 1}, "reverse must be true or false, got 1"),
        ({"revers": True}, "no route takes 'revers'; did you mean 'reverse'"),
        ({"rows": 3}, "multiply to"),
        ({"host_size": 0}, "host_size must be a positive integer.*got 0"),
        ({"host_size": True}, "host_size must be a positive integer.*got True"),
        ({"host_size": "4"}, "got '4'"),
        ({"hostsize": 4}, "no route takes 'hostsize'; did you mean 'host_size'"),
    ),
)
def test_a_wrong_placement_is_refused_by_digits_and_sizes(words: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_placed({"name": "mesh", "rows": 2, "cols": 4, **words}, 8)


def test_rows_cross_once_only_where_a_route_gathers() -> None:
    said = {"name": "all_gather", "host_size": 4}
    placed = read_placed(said, 8)
    assert (placed.host_size, placed.to_words(), str(placed)) == (
        4,
        said,
        "all_gather, once to hosts of 4",
    )
    assert read_placed({"name": "ring", "host_size": 1}, 8).to_words() == {"name": "ring"}
    for route in ({"name": "ring"}, {"name": "double_ring", "inner": 2}):
        with pytest.raises(ValueError, match="host_size 4 is for routes that bring rows.*leave"):
            read_placed({**route, "host_size": 4}, 8)


@given(st.permutations(range(8)))
def test_relabel_undone_is_the_schedule(ranks: list[int]) -> None:
    there = tuple(ranks)
    back = tuple(there.index(rank) for rank in range(8))
    for schedule in (concentric(8, 2), mesh(2, 4)):
        moved = check(relabel(schedule, there))
        assert moved.holdings()[1][there[3]] == tuple(
            sorted(there[shard] for shard in schedule.holdings()[1][3])
        )
        assert relabel(moved, back) == schedule


def test_every_divisor_pair_team_and_double_ring_is_a_route() -> None:
    found = routes(16)
    assert [route["team_size"] for route in found if route["name"] == "concentric"] == [2, 4]
    assert [route["inner"] for route in found if route["name"] == "double_ring"] == [2, 4, 8]
    meshes = [(r["rows"], r["cols"]) for r in found if r["name"] == "mesh"]
    assert meshes == [(2, 8), (4, 4), (8, 2), (16, 1)]
    assert [len(digits(route, 16)) for route in found[:2]] == [1, 1]


def test_every_route_has_the_shape_of_its_schedule() -> None:
    split = HeadSplit(Workload(SHAPE, 1024), cluster(4, 4))
    for route in routes(16):
        shape, schedule = (
            shape_of(in_rank_order(route, 16), split),
            make_schedule(route, 16),
        )
        gathers = shape.queries.foreign > 0, shape.keys.foreign > 0
        assert (gathers, shape.num_hops) == (schedule.gathers(), len(schedule.hops))


def test_a_route_without_a_shape_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'spiral' has no shape"):
        shape_of(
            in_rank_order({"name": "spiral"}, 4), HeadSplit(Workload(SHAPE, 64), cluster(1, 4))
        )


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 12, 16)] == [[1], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]
