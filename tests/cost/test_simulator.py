"""The simulator of ranks and links, which go on as soon as they can, on phases written by hand.

Times are seconds. On `plain_cluster` a message of BYTES takes 1 s through a NIC and 0.25 s inside a
host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import BYTES, plain_cluster
from wf_backends.cluster.topology import Link, Topology
from wf_backends.cost.route_shape import LinkBytes
from wf_backends.cost.simulator import MessageSizes, PhaseRound, RankPhase, Simulator, finish_times
from wf_backends.lowering.ulysses_groups import UlyssesGroups

TWO_MESSAGES = {0: [(2, BYTES)], 1: [(3, BYTES)]}
"""From both ranks of host 0 to host 1, by sender."""


def simulated(
    topology: Topology,
    hops_by_phase: Sequence[Mapping[int, MessageSizes]],
    tiles_s: Sequence[Sequence[float]] | None = None,
    degree: int = 1,
) -> Simulator:
    """A simulator after phases of one round.

    Args:
        hops_by_phase: [phase] -> rank -> the messages that it sends.
        tiles_s: [phase][rank] -> seconds of its tiles; None = 0 everywhere.
        degree: of Ulysses groups, which are the ranks.
    """
    groups = UlyssesGroups(topology.size, degree)
    simulator = Simulator(topology, groups)
    for phase, hops in enumerate(hops_by_phase):
        seconds = tiles_s[phase] if tiles_s else [0.0] * groups.count
        ranks = [
            RankPhase(f"step {phase}", hops.get(rank, []), (PhaseRound(seconds=seconds[rank]),))
            for rank in range(groups.count)
        ]
        simulator.run(ranks)
    return simulator


def total_s(simulator: Simulator) -> float:
    return simulator.cost().seconds


def test_steps_of_different_ranks_overlap() -> None:
    """A message in each of two steps, between other ranks."""
    simulator = simulated(plain_cluster(4, 1, 1), [{0: [(1, BYTES)]}, {2: [(3, BYTES)]}])
    assert total_s(simulator) == pytest.approx(1)


def test_a_step_of_a_rank_waits_for_its_step_before() -> None:
    simulator = simulated(plain_cluster(4, 1, 1), [{0: [(1, BYTES)]}, {1: [(2, BYTES)]}])
    assert total_s(simulator) == pytest.approx(2)


def test_a_message_starts_when_both_its_ranks_are_ready() -> None:
    topology = plain_cluster(4, 1, 1, latency_s=0.25)
    simulator = simulated(topology, [{}, {0: [(1, BYTES)]}], [[0, 5, 0, 7], [1, 1, 1, 1]])
    assert simulator.now == pytest.approx([6.25, 6.25, 1, 8])
    assert simulator.cost().compute_s == pytest.approx(8)


@pytest.mark.parametrize(("nics", "expected_s"), ((1, 2), (2, 1)))
def test_messages_posted_together_share_a_nic(nics: int, expected_s: float) -> None:
    simulator = simulated(plain_cluster(2, 2, nics), [TWO_MESSAGES])
    assert total_s(simulator) == pytest.approx(expected_s)


def test_a_nic_sends_and_receives_at_the_same_time() -> None:
    both_ways = TWO_MESSAGES | {2: [(0, BYTES)], 3: [(1, BYTES)]}
    assert total_s(simulated(plain_cluster(2, 2, 2), [both_ways])) == pytest.approx(1)


def test_of_messages_that_share_a_nic_the_short_one_arrives_first() -> None:
    """The short one has half of the NIC for 2 s, then the long one has all of it for 2 s more.

    Rank 0 computes for 1 s meanwhile.
    """
    messages = {0: [(2, BYTES)], 1: [(3, 3 * BYTES)]}
    simulator = simulated(plain_cluster(2, 2, 1), [messages], [[1, 0, 0, 0]])
    assert simulator.now == pytest.approx([2, 4, 2, 4])


def test_a_rank_waits_for_the_last_of_its_messages() -> None:
    messages = {0: [(2, 3 * BYTES), (3, BYTES)]}
    assert simulated(plain_cluster(2, 2, 1), [messages]).now == pytest.approx([4, 0, 4, 2])


ready_and_alone_s = st.tuples(st.floats(0, 10), st.floats(0.01, 10))


@given(st.lists(ready_and_alone_s, min_size=1, max_size=8), st.floats(0, 10))
def test_a_shared_link_is_never_idle_and_shared_evenly(queue, free_at) -> None:
    """Between two events all messages that are ready and not finished get equal parts."""
    finished = finish_times(queue, free_at)
    one_after_another = free_at
    for ready, alone_s in sorted(queue):
        one_after_another = max(one_after_another, ready) + alone_s
    assert max(finished) == pytest.approx(one_after_another)
    events = sorted({free_at, *finished, *(max(free_at, ready) for ready, _ in queue)})
    sent_s = [0.0] * len(queue)
    for start, stop in pairwise(events):
        active = [
            message
            for message, (ready, _) in enumerate(queue)
            if ready <= start < finished[message] - 1e-9
        ]
        for message in active:
            sent_s[message] += (stop - start) / len(active)
    assert sent_s == pytest.approx([alone_s for _, alone_s in queue], abs=1e-6)


@pytest.mark.parametrize(("nics", "expected_s"), ((1, 2), (2, 1)))
def test_every_member_of_a_ulysses_group_sends_its_own_heads(nics: int, expected_s: float) -> None:
    simulator = simulated(plain_cluster(2, 2, nics), [{0: [(1, BYTES)]}], degree=2)
    assert total_s(simulator) == pytest.approx(expected_s)


@pytest.mark.parametrize(("direct_links", "expected_s"), ((False, 0.75), (True, 0.25)))
def test_direct_links_inside_a_host_are_not_shared(direct_links: bool, expected_s: float) -> None:
    topology = plain_cluster(1, 4, 1, direct_links=direct_links)
    messages = {0: [(peer, BYTES) for peer in (1, 2, 3)]}
    assert total_s(simulated(topology, [messages])) == pytest.approx(expected_s)


@pytest.mark.parametrize("tiles_s", (0.0, 2.0))
@pytest.mark.parametrize("occupied", (0.0, 0.5, 1.0))
def test_the_occupied_share_of_a_message_is_added_to_the_tiles(
    occupied: float, tiles_s: float
) -> None:
    """Two ranks exchange messages of 1 s: half of each message's share counts on either side."""
    topology = plain_cluster(2, 1, 1, occupied=occupied)
    exchange = {0: [(1, BYTES)], 1: [(0, BYTES)]}
    simulator = simulated(topology, [exchange], [[tiles_s] * 2])
    assert simulator.now == pytest.approx([max(1.0, tiles_s + occupied)] * 2)
    assert simulator.cost().compute_s == tiles_s
    assert LinkBytes(BYTES).hold_s(topology) == pytest.approx(occupied)  # in closed form


def test_only_the_two_ranks_of_a_message_are_occupied() -> None:
    topology = plain_cluster(4, 1, 1, occupied=1.0)
    simulator = simulated(topology, [{0: [(1, BYTES)]}], [[2.0] * 4])
    assert simulator.now == pytest.approx([2.5, 2.5, 2, 2])


def test_results_that_are_sent_to_their_owner_occupy_both_ranks() -> None:
    simulator = Simulator(plain_cluster(2, 1, 1, occupied=1.0), UlyssesGroups(2))
    first = PhaseRound(seconds=1, reduce=[(1, BYTES)])
    sender = RankPhase("step 0", rounds=(first, PhaseRound(seconds=1)))
    owner = RankPhase("step 0", rounds=(PhaseRound(), PhaseRound(seconds=2)))
    simulator.run([sender, owner])
    assert simulator.now == pytest.approx([2.5, 2.5])


def test_a_rank_goes_on_while_its_results_are_sent_to_their_owner() -> None:
    """The results take from 1 s to 4 s; the sender has computed after 2 s."""
    simulator = Simulator(plain_cluster(2, 1, 1), UlyssesGroups(2))
    first = PhaseRound(seconds=1, reduce=[(1, 3 * BYTES)])
    sender = RankPhase("step 0", rounds=(first, PhaseRound(seconds=1)))
    simulator.run([sender, RankPhase("step 0")])
    assert simulator.now == pytest.approx([2, 0])
    assert total_s(simulator) == pytest.approx(4)


def test_results_queue_behind_messages_that_were_posted_before() -> None:
    """The fetches of all rounds are posted first, the results of a round after its tiles."""
    message: MessageSizes = [(0, BYTES)]
    rounds = PhaseRound(reduce=message), PhaseRound(fetch=message), PhaseRound(fetch=message)
    simulator = Simulator(plain_cluster(2, 1, 1), UlyssesGroups(2))
    simulator.run([RankPhase("step 0"), RankPhase("step 0", rounds=rounds)])
    assert simulator.now == pytest.approx([2, 2])
    assert total_s(simulator) == pytest.approx(3)


def test_in_closed_form_a_rank_is_occupied_by_its_own_messages() -> None:
    """Half of the time of one message out and one in, of its share of the NIC's bytes; each
    further message adds a latency."""
    topology = plain_cluster(2, 2, 1, occupied=0.5)
    topology = replace(topology, inside=Link(0.25, 4 * BYTES))
    assert LinkBytes(8 * BYTES).hold_s(topology) == pytest.approx(0.5 * (0.25 + 1.0))
    assert LinkBytes(0, 4 * BYTES).hold_s(topology) == pytest.approx(0.5 * (0.25 + 1.0))
    assert LinkBytes(8 * BYTES).hold_s(topology, messages=3) == pytest.approx(
        0.5 * (3 * 0.25 + 1.0)
    )
    assert LinkBytes().hold_s(topology) == 0


def test_spans_are_those_of_the_rank_that_ends_last() -> None:
    cost = simulated(plain_cluster(2, 1, 1), [{0: [(1, BYTES)]}], [[0.25, 0.5]]).cost()
    spans = {(span.kind, span.start, span.stop) for span in cost.spans}
    assert ("transfer", 0.0, 1.0) in spans and len(spans) == 2
    assert cost.transfer_s == 1.0 and cost.nic_bytes == BYTES
