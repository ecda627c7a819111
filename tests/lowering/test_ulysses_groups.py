"""Which ranks trade heads for tokens, and which go around a route together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.ulysses_groups import UlyssesGroups
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.placement import divisors
from wf_backends.schedule.ranges import size


@st.composite
def groups(draw: st.DrawFn) -> UlyssesGroups:
    ranks = draw(st.integers(1, 64))
    degree = draw(st.sampled_from(divisors(ranks)))
    return UlyssesGroups(ranks, degree, draw(st.sampled_from(divisors(ranks // degree))))


@given(groups())
def test_every_rank_is_one_member_of_one_pool(of: UlyssesGroups) -> None:
    for rank in range(of.size):
        group, member = of.find(rank)
        assert of.rank(group, member) == rank
        assert of.members(group)[member] == rank == of.route(member)[group]
    assert sorted(rank for group in range(of.count) for rank in of.members(group)) == list(
        range(of.size)
    )


@given(groups())
def test_members_are_a_stride_apart(of: UlyssesGroups) -> None:
    for group in range(of.count):
        members = of.members(group)
        assert list(members) == list(range(members[0], members[-1] + 1, of.stride))


@given(groups(), st.integers(1, 64))
def test_how_far_pools_are_apart(of: UlyssesGroups, groups: int) -> None:
    if groups < of.count and (groups < of.stride or groups % of.stride == 0):
        assert of.rank(groups, 0) - of.rank(0, 0) == of.rank_distance(groups)


def test_head_first_and_context_first() -> None:
    assert UlyssesGroups(8, 4, 1).members(1) == (4, 5, 6, 7)
    assert UlyssesGroups(8, 4, 1).route(1) == (1, 5)
    assert UlyssesGroups(8, 4, 2).members(1) == (1, 3, 5, 7)
    assert UlyssesGroups(8, 4, 2).route(1) == (2, 3)
    assert UlyssesGroups(8, 2, 2).members(3) == (5, 7)  # in between: blocks of two routes
    assert UlyssesGroups(8, 2, 2).route(0) == (0, 1, 4, 5)


@pytest.mark.parametrize("stride", (1, 2, 4))
def test_pools_hold_what_their_members_do(stride: int) -> None:
    of, layout = UlyssesGroups(8, 2, stride), zigzag(8, 50)
    merged = of.merge(layout)
    for group, rows in enumerate(merged):
        assert size(rows) == sum(size(layout[rank]) for rank in of.members(group))
    assert sum(map(size, merged)) == 50


def test_consecutive_ranks_of_a_zigzag_are_a_zigzag_of_fewer_ranks() -> None:
    assert UlyssesGroups(8, 2).merge(zigzag(8, 64)) == zigzag(4, 64)
    assert UlyssesGroups(4, 2, 2).merge(contiguous(4, 8)) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


@pytest.mark.parametrize(("size", "host_size"), ((16, 4), (16, 8), (24, 6), (64, 8)))
def test_groups_on_one_host_are_neighbours(size, host_size):
    """Their like members are on one host, and those of the next group after them are not."""
    for degree in (d for d in (1, 2, 3, 4, 8) if size % d == 0):
        for stride in (s for s in (1, 2, 4, 8) if size // degree % s == 0):
            groups = UlyssesGroups(size, degree, stride)
            near = groups.groups_per_host(host_size)
            for group in range(groups.count):
                first = group // near * near
                hosts = [
                    [groups.rank(one, m) // host_size for m in range(degree)]
                    for one in (first, group)
                ]
                assert hosts[0] == hosts[1]
