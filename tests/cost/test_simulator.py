"""Ranks and links that go on as soon as they can, on hand-made phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import BYTES, plain_cluster
from wf_backends.cluster.topology import Link, Topology
from wf_backends.cost.route_shape import Load
from wf_backends.cost.simulator import Messages, PhaseRound, RankPhase, Simulator, finish_times
from wf_backends.lowering.ulysses_groups import UlyssesGroups


def simulated(
    at: Topology, phases: Sequence[Mapping[int, Messages]], computes=None, degree=1, stride=1
) -> Simulator:
    """After phases of one round: messages by rank, and seconds of tiles by phase and rank."""
    simulator, size = Simulator(at, UlyssesGroups(at.size, degree, stride)), at.size // degree
    for index, sent in enumerate(phases):
        seconds = computes[index] if computes else [0.0] * size
        ranks = [
            RankPhase(f"step {index}", sent.get(rank, []), (PhaseRound(seconds=seconds[rank]),))
            for rank in range(size)
        ]
        simulator.run(ranks)
    return simulator


def test_ranks_that_have_nothing_to_do_with_each_other_do_not_keep_step() -> None:
    """One link is busy in the first step, the other in the second."""
    apart = [{0: [(1, BYTES)]}, {2: [(3, BYTES)]}]
    assert simulated(plain_cluster(4, 1, 1), apart).cost(0, 0).seconds == pytest.approx(1)
    chain = [{0: [(1, BYTES)]}, {1: [(2, BYTES)]}]
    assert simulated(plain_cluster(4, 1, 1), chain).cost(0, 0).seconds == pytest.approx(2)


def test_a_message_sets_off_when_both_ends_are_ready() -> None:
    at = plain_cluster(4, 1, 1, latency_s=0.25)
    simulator = simulated(at, [{}, {0: [(1, BYTES)]}], [[0, 5, 0, 7], [1, 1, 1, 1]])
    assert simulator.now == pytest.approx([6.25, 6.25, 1, 8])
    assert simulator.cost(0, 0).compute_s == pytest.approx(8)


def test_messages_of_one_moment_share_a_nic_both_ways() -> None:
    both = {0: [(2, BYTES)], 1: [(3, BYTES)]}
    assert simulated(plain_cluster(2, 2, 1), [both]).cost(0, 0).seconds == pytest.approx(2)
    assert simulated(plain_cluster(2, 2, 2), [both]).cost(0, 0).seconds == pytest.approx(1)
    back = both | {2: [(0, BYTES)], 3: [(1, BYTES)]}
    assert simulated(plain_cluster(2, 2, 2), [back]).cost(0, 0).seconds == pytest.approx(1)


def test_of_the_messages_that_share_a_nic_a_short_one_is_there_first() -> None:
    """It has half of the link until then, the long one all of it afterwards."""
    both = {0: [(2, BYTES)], 1: [(3, 3 * BYTES)]}
    found = simulated(plain_cluster(2, 2, 1), [both], [[1, 0, 0, 0]])
    assert found.now == pytest.approx([2, 4, 2, 4])


def test_a_rank_waits_for_the_last_of_its_messages() -> None:
    sent = {0: [(2, 3 * BYTES), (3, BYTES)]}
    assert simulated(plain_cluster(2, 2, 1), [sent]).now == pytest.approx([4, 0, 4, 2])


waits = st.tuples(st.floats(0, 10), st.floats(0.01, 10))


@given(st.lists(waits, min_size=1, max_size=8), st.floats(0, 10))
def test_what_is_shared_is_never_idle_and_everybody_gets_as_much(queue, free) -> None:
    """By hand, in small steps: those that are ready and not through get equal parts."""
    through = finish_times(queue, free)
    in_turns = free
    for ready, took in sorted(queue):
        in_turns = max(in_turns, ready) + took
    assert max(through) == pytest.approx(in_turns)
    edges = sorted({free, *through, *(max(free, ready) for ready, _ in queue)})
    got = [0.0] * len(queue)
    for start, stop in pairwise(edges):
        here = [at for at, (ready, _) in enumerate(queue) if ready <= start < through[at] - 1e-9]
        for at in here:
            got[at] += (stop - start) / len(here)
    assert got == pytest.approx([took for _, took in queue], abs=1e-6)


def test_members_of_a_rank_all_send_their_own_heads() -> None:
    assert simulated(plain_cluster(2, 2, 1), [{0: [(1, BYTES)]}], degree=2).cost(
        0, 0
    ).seconds == pytest.approx(2)
    assert simulated(plain_cluster(2, 2, 2), [{0: [(1, BYTES)]}], degree=2).cost(
        0, 0
    ).seconds == pytest.approx(1)


@pytest.mark.parametrize(("direct", "took"), ((False, 0.75), (True, 0.25)))
def test_direct_links_inside_a_host_are_not_shared(direct: bool, took: float) -> None:
    at = plain_cluster(1, 4, 1, direct_links=direct)
    sent = {0: [(peer, BYTES) for peer in (1, 2, 3)]}
    assert simulated(at, [sent]).cost(0, 0).seconds == pytest.approx(took)


@pytest.mark.parametrize("occupied", (0.0, 0.5, 1.0))
def test_what_part_of_a_message_nothing_hides_is_added_to_the_tiles(occupied: float) -> None:
    """An exchange of a second: alone it takes that, beside two seconds of tiles it adds its part.

    Message by message, and in closed form.
    """
    at = plain_cluster(2, 1, 1, occupied=occupied)
    both = {0: [(1, BYTES)], 1: [(0, BYTES)]}
    for computes in (0.0, 2.0):
        alone = simulated(at, [both], [[computes] * 2])
        took = max(1.0, computes + occupied)
        assert alone.now == pytest.approx([took] * 2)
        assert alone.cost(0, 0).compute_s == computes
    assert Load(BYTES).hold_s(at) == pytest.approx(occupied)


def test_only_the_ranks_at_the_ends_of_a_message_are_held() -> None:
    at = plain_cluster(4, 1, 1, occupied=1.0)
    simulator = simulated(at, [{0: [(1, BYTES)]}], [[2.0] * 4])
    assert simulator.now == pytest.approx([2.5, 2.5, 2, 2])


def test_results_on_their_way_home_hold_both_ends() -> None:
    at = plain_cluster(2, 1, 1, occupied=1.0)
    simulator = Simulator(at, UlyssesGroups(2))
    first = PhaseRound(seconds=1, home=[(1, BYTES)])
    leaving = RankPhase("step 0", rounds=(first, PhaseRound(seconds=1)))
    alone = RankPhase("step 0", rounds=(PhaseRound(), PhaseRound(seconds=2)))
    simulator.run([leaving, alone])
    assert simulator.now == pytest.approx([2.5, 2.5])


def test_results_go_home_while_their_rank_goes_on() -> None:
    simulator = Simulator(plain_cluster(2, 1, 1), UlyssesGroups(2))
    first = PhaseRound(seconds=1, home=[(1, 3 * BYTES)])
    leaving = RankPhase("step 0", rounds=(first, PhaseRound(seconds=1)))
    simulator.run([leaving, RankPhase("step 0")])
    assert simulator.now == pytest.approx([2, 0])
    assert simulator.cost(0, 0).seconds == pytest.approx(4)


def test_what_leaves_goes_behind_what_was_posted_before() -> None:
    one: Messages = [(0, BYTES)]
    rounds = PhaseRound(home=one), PhaseRound(fetch=one), PhaseRound(fetch=one)
    simulator = Simulator(plain_cluster(2, 1, 1), UlyssesGroups(2))
    simulator.run([RankPhase("step 0"), RankPhase("step 0", rounds=rounds)])
    assert simulator.now == pytest.approx([2, 2]) and simulator.cost(0, 0).seconds == pytest.approx(
        3
    )


def test_in_closed_form_a_rank_is_held_by_what_it_sends_and_receives() -> None:
    """One message out and one in; of a NIC's bytes its share; of more, what comes on top."""
    at = plain_cluster(2, 2, 1, occupied=0.5)
    at = replace(at, inside=Link(0.25, 4 * BYTES))
    assert Load(8 * BYTES).hold_s(at) == pytest.approx(0.5 * (0.25 + 1.0))
    assert Load(0, 4 * BYTES).hold_s(at) == pytest.approx(0.5 * (0.25 + 1.0))
    assert Load(8 * BYTES).hold_s(at, messages=3) == pytest.approx(0.5 * (3 * 0.25 + 1.0))
    assert Load().hold_s(at) == 0


def test_the_rank_that_ends_last_tells_what_it_did() -> None:
    at = plain_cluster(2, 1, 1)
    cost = simulated(at, [{0: [(1, BYTES)]}], [[0.25, 0.5]]).cost(0, 0)
    told = {(span.kind, span.start, span.stop) for span in cost.spans}
    assert ("transfer", 0.0, 1.0) in told and len(told) == 2
    assert cost.transfer_s == 1.0 and cost.nic_bytes == BYTES
