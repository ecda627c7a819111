"""The cost of a pass, message by message: bytes of programs, NICs, time and placements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.cost.passes import KINDS, SHAPE, kind_id, route
from tests.planning import lab_cluster
from tests.sent_bytes import bytes_sent
from tests.slices import window_with_sinks
from wf_backends.cost.exact_cost import pass_cost, problem_of, rank_phases
from wf_backends.cost.simulator import LinkEnd, MessageSizes, link_ends
from wf_backends.cost.workload import FORWARD, HeadSplit, PassKind, Workload
from wf_backends.lowering.derivation import lower
from wf_backends.lowering.message_bytes import Shape
from wf_backends.lowering.program import RankProgram
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.placement import digits, orders, place, placements
from wf_backends.schedule.schedule import Schedule, check

MASKS = (
    Mask(),
    Mask(CAUSAL),
    Mask(Band(20, 0)),
    Mask(CAUSAL, (0, 10, 60, 96)),
    make_mask(**window_with_sinks(20, 3, 96)),
)
LAB_SHAPE = Shape(batch=1, heads=8, kv_heads=8, head_dim=64, itemsize=4)
LAB_SEQLEN = 8192


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_a_wider_value_adds_its_elements_to_rows_and_partial_results(kind: PassKind) -> None:
    """8 elements more of a value: 64 more of all heads of out or dout, 32 of all key heads."""
    more_row, more_partial = {  # bytes of (queries, keys)
        "forward": ((0, 32 * 2), (64 * 4, 0)),
        "backward": ((64 * 2, 32 * 2), (0, 32 * 4)),
    }[kind.name]
    rows, wider = kind.row_bytes(SHAPE), kind.row_bytes(replace(SHAPE, value_dim=16 + 8))
    for side, more in zip(("stay", "walk"), kind.ordered(*more_row), strict=True):
        assert getattr(wider, side).row == getattr(rows, side).row + more
    for side, more in zip(("stay", "walk"), kind.ordered(*more_partial), strict=True):
        assert getattr(wider, side).partial == getattr(rows, side).partial + more
        assert getattr(wider, side).partial == getattr(wider, side).summed


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_partial_results_in_16_bits_are_half_as_large_but_for_the_lse(kind: PassKind) -> None:
    rows, narrow = kind.row_bytes(SHAPE), kind.row_bytes(replace(SHAPE, partial_size=2))
    assert (narrow.stay.row, narrow.walk.row) == (rows.stay.row, rows.walk.row)
    assert (narrow.stay.summed, narrow.walk.summed) == (rows.stay.partial, rows.walk.partial)
    lse = 8 * 4 if kind.name == "forward" else 0
    float32_bytes = rows.stay.partial + rows.walk.partial - lse
    assert narrow.stay.partial + narrow.walk.partial - lse == float32_bytes / 2


def messages_of(
    program: RankProgram, split: HeadSplit, kind: PassKind
) -> Iterator[tuple[str, MessageSizes]]:
    """All messages that a rank sends, with the labels under which a communicator counts them."""
    for phase in rank_phases(program, split, kind):
        yield phase.label, phase.hop
        for phase_round in phase.rounds:
            yield f"{kind.name} gather", phase_round.fetch
            yield f"{kind.name} reduce", phase_round.reduce


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_predicted_bytes_are_those_of_the_programs(size: int, kind: PassKind, mask: Mask) -> None:
    split = HeadSplit(Workload(SHAPE, 96, mask), lab_cluster(1, size, 1))
    row_bytes = kind.row_bytes(split.shape)
    for placed in placements(size):
        problem = problem_of(split, place(placed, size), kind)
        for rank in range(size):
            program = lower(problem, rank)
            predicted = Counter[str]()
            for label, messages in messages_of(program, split, kind):
                predicted[label] += sum(num_bytes for _, num_bytes in messages)
            predicted = {label: num_bytes for label, num_bytes in predicted.items() if num_bytes}
            assert predicted == bytes_sent(program, row_bytes, kind.name)


def test_every_byte_crosses_one_link_end_out_and_one_in() -> None:
    split = HeadSplit(Workload(SHAPE, 96), lab_cluster(2, 4, 2))
    schedule = place(route(8, name="concentric", team_size=2), 8)
    problem = problem_of(split, schedule, FORWARD)
    by_end, total = Counter[LinkEnd](), 0
    for rank in range(8):
        program = lower(problem, rank)
        total += sum(bytes_sent(program, FORWARD.row_bytes(SHAPE), "forward").values())
        for _, messages in messages_of(program, split, FORWARD):
            for peer, num_bytes in messages:
                for end in link_ends(split.topology, rank, peer):
                    by_end[end] += num_bytes
    for way in ("out", "in"):
        assert sum(num_bytes for (_, w, *_), num_bytes in by_end.items() if w == way) == total


def teams_in_rank_order(n: int, team_size: int) -> Schedule:
    return place(route(n, name="concentric", team_size=team_size), n)


def neighbouring_teams(n: int, team_size: int) -> Schedule:
    """The concentric rings of the laboratory: member a starts with the keys of team t + a."""
    num_teams, team_and_member = n // team_size, [divmod(rank, team_size) for rank in range(n)]

    def ranks_of(team: int) -> tuple[int, ...]:
        return tuple(team % num_teams * team_size + member for member in range(team_size))

    hop = tuple(ranks_of(team - team_size)[member] for team, member in team_and_member)
    return check(
        Schedule(
            q=tuple(ranks_of(team) for team, _ in team_and_member),
            kv=tuple(ranks_of(team + member) for team, member in team_and_member),
            hops=(hop,) * (num_teams // team_size - 1),
        )
    )


@pytest.mark.parametrize(
    ("hosts", "ranks", "nics", "make_teams", "team_size", "ring_units", "team_units", "ratio"),
    [
        (4, 2, 1, neighbouring_teams, 2, 14, 12, 1.17),
        (4, 2, 2, teams_in_rank_order, 2, 14, 8, 1.75),
        (2, 4, 1, teams_in_rank_order, 2, 14, 8, 1.75),
        (2, 4, 4, teams_in_rank_order, 2, 14, 4, 3.50),
        (4, 4, 4, teams_in_rank_order, 4, 30, 8, 3.75),
    ],
)
def test_bytes_through_the_busiest_nic_are_those_of_the_laboratory(
    hosts: int,
    ranks: int,
    nics: int,
    make_teams: Callable[[int, int], Schedule],
    team_size: int,
    ring_units: int,
    team_units: int,
    ratio: float,
) -> None:
    """A unit is one rank's shard of Q. The ratio, of a ring to teams, is that of the times, too."""
    n = hosts * ranks
    split = HeadSplit(Workload(LAB_SHAPE, LAB_SEQLEN), lab_cluster(hosts, ranks, nics))
    unit = LAB_SEQLEN // n * 8 * 64 * 4
    ring = pass_cost(split, place(route(n, name="ring"), n), FORWARD)
    teams = pass_cost(split, make_teams(n, team_size), FORWARD)
    assert round(ring.nic_bytes / unit) == ring_units
    assert round(teams.nic_bytes / unit) == team_units
    assert ring.nic_bytes / teams.nic_bytes == pytest.approx(ratio, abs=0.005)
    assert ring.transfer_s / teams.transfer_s == pytest.approx(ratio, abs=0.005)


def test_another_order_of_digits_sends_less_than_rank_order_where_two_ranks_share_a_nic() -> None:
    split = HeadSplit(Workload(LAB_SHAPE, LAB_SEQLEN), lab_cluster(4, 2, 1))
    unit = LAB_SEQLEN // 8 * 8 * 64 * 4
    in_order = route(8, name="concentric", team_size=2)
    units = {}
    for order in orders(digits(in_order.route, 8)):
        cost = pass_cost(split, place(replace(in_order, order=order), 8), FORWARD)
        units[order] = cost.nic_bytes / unit
    assert round(units[0, 1, 2]) == 16
    assert min(units.values()) == pytest.approx(10, abs=0.05)


@pytest.mark.parametrize("stride", (1, 2, 4))
def test_each_member_of_a_ulysses_group_sends_to_its_equal_member(stride: int) -> None:
    """Two hosts of four: a ring of four groups stays inside hosts only with stride 4."""
    split = HeadSplit(Workload(SHAPE, 96), lab_cluster(2, 4, 4), 2, stride)
    topology, groups = split.topology, split.groups
    cost = pass_cost(split, place(route(4, name="ring"), 4), FORWARD)
    crosses_hosts = {
        topology.host(groups.rank(group, member))
        != topology.host(groups.rank((group - 1) % 4, member))
        for group in range(4)
        for member in range(2)
    }
    assert crosses_hosts == ({False} if stride == 4 else {False, True})
    assert bool(cost.nic_bytes) == (True in crosses_hosts)
    assert cost.transfer_s > 0


def test_a_step_takes_the_longer_of_its_tiles_and_its_hop() -> None:
    split = HeadSplit(Workload(SHAPE, 96), lab_cluster(4, 1, 1))
    cost = pass_cost(split, place(route(4, name="ring"), 4), FORWARD)
    tile_s = 24 * 24 * 4 * 8 * 16 / 2e10
    hop_s = 1e-3 + 24 * 2 * 4 * 16 * 2 / (25e6 / 8)
    assert cost.spans[0].label == "forward step 0"
    assert cost.seconds == pytest.approx(3 * max(tile_s, hop_s) + tile_s)
    assert cost.exposed_s == pytest.approx(3 * (hop_s - tile_s))
