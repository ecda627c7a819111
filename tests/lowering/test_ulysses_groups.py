"""Ulysses groups: which ranks trade heads for tokens, and which ranks form a route."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.lowering.ulysses_groups import UlyssesGroups
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.placement import divisors
from wf_backends.schedule.ranges import size


@st.composite
def drawn_groups(draw: st.DrawFn) -> UlyssesGroups:
    ranks = draw(st.integers(1, 64))
    degree = draw(st.sampled_from(divisors(ranks)))
    return UlyssesGroups(ranks, degree, draw(st.sampled_from(divisors(ranks // degree))))


@given(drawn_groups())
def test_every_rank_is_one_member_of_one_group(groups: UlyssesGroups) -> None:
    for rank in range(groups.size):
        group, member = groups.find(rank)
        assert groups.rank(group, member) == rank
        assert groups.members(group)[member] == rank == groups.route(member)[group]
    all_members = [rank for group in range(groups.count) for rank in groups.members(group)]
    assert sorted(all_members) == list(range(groups.size))


@given(drawn_groups())
def test_members_of_a_group_are_a_stride_apart(groups: UlyssesGroups) -> None:
    for group in range(groups.count):
        members = groups.members(group)
        assert list(members) == list(range(members[0], members[-1] + 1, groups.stride))


@given(drawn_groups())
def test_rank_distance_is_that_of_equal_members(groups: UlyssesGroups) -> None:
    for distance in range(1, groups.count):
        if distance < groups.stride or distance % groups.stride == 0:
            assert groups.rank(distance, 0) - groups.rank(0, 0) == groups.rank_distance(distance)


def test_head_first_groups_are_consecutive_ranks() -> None:
    groups = UlyssesGroups(8, degree=4, stride=1)
    assert groups.members(1) == (4, 5, 6, 7)
    assert groups.route(1) == (1, 5)


def test_context_first_routes_are_consecutive_ranks() -> None:
    groups = UlyssesGroups(8, degree=4, stride=2)
    assert groups.members(1) == (1, 3, 5, 7)
    assert groups.route(1) == (2, 3)


def test_groups_of_a_stride_in_between_are_in_blocks() -> None:
    groups = UlyssesGroups(8, degree=2, stride=2)
    assert groups.members(3) == (5, 7)
    assert groups.route(0) == (0, 1, 4, 5)


@pytest.mark.parametrize("stride", (1, 2, 4))
def test_a_group_holds_the_rows_of_its_members(stride: int) -> None:
    """50 tokens: not a multiple of the 8 ranks."""
    groups, layout = UlyssesGroups(8, 2, stride), zigzag(8, 50)
    merged = groups.merge(layout)
    for group, rows in enumerate(merged):
        assert size(rows) == sum(size(layout[rank]) for rank in groups.members(group))
    assert sum(map(size, merged)) == 50


def test_consecutive_ranks_of_a_zigzag_merge_into_a_zigzag_of_fewer_ranks() -> None:
    assert UlyssesGroups(8, 2).merge(zigzag(8, 64)) == zigzag(4, 64)


def test_ranks_that_are_apart_merge_into_several_chunks() -> None:
    assert UlyssesGroups(4, 2, 2).merge(contiguous(4, 8)) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


def hosts_of(groups: UlyssesGroups, group: int, host_size: int) -> list[int]:
    """By member, the host of its rank."""
    return [rank // host_size for rank in groups.members(group)]


@pytest.mark.parametrize(("size", "host_size"), ((16, 4), (16, 8), (24, 6), (64, 8)))
def test_equal_members_of_the_groups_of_a_host_share_their_hosts(size, host_size):
    for degree in (d for d in (1, 2, 3, 4, 8) if size % d == 0):
        for stride in (s for s in (1, 2, 4, 8) if size // degree % s == 0):
            groups = UlyssesGroups(size, degree, stride)
            per_host = groups.groups_per_host(host_size)
            for group in range(groups.count):
                first = group // per_host * per_host
                hosts, expected = (hosts_of(groups, g, host_size) for g in (group, first))
                assert hosts == expected, (degree, stride, group)
