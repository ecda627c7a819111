"""What trading heads for tokens costs in chunks, and what of it the passes hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.exact_cost import Job, Workload
from wf_backends.planner.overlap_model import Chunk, Cost, Phase, Transfer
from wf_backends.planner.ulysses_cost import pipelined, trade_costs, ulysses_cost

RATES = (("sdpa", KernelRate(1e9, 1e9)),)
LATENCY = 0.5
AT = Topology("two hosts", 2, 1, 1, Link(1e-9, 1e12), Link(LATENCY, 1e3), RATES, 1e9)
WORK = Workload(Shape(1, 8, 8, 16, itemsize=4), 64)
ROW = 32 * 16 * 4  # bytes of one head of a rank's rows
PASS = Cost((), 0.0, 0.0, 7.0, 3.0, seconds=2.0, compute_s=1.5)


def job(chunks: int, **changes: float) -> Job:
    return Job(WORK, replace(AT, **changes), degree=2, chunks=chunks)


@pytest.mark.parametrize("chunks", (1, 2, 4))
def test_only_one_way_in_and_one_way_out_hide_behind_nothing(chunks: int) -> None:
    whole, cost = ulysses_cost(job(1)), ulysses_cost(job(chunks))
    assert [phase.label for phase in cost.phases] == ["ulysses qkv", "ulysses out"]
    for phase, heads in zip(cost.phases, (12, 4), strict=True):
        assert phase.hop.busy_s == pytest.approx(heads / chunks * ROW / 1e3)
        assert phase.hop.latency_s == LATENCY
    assert cost.nic_bytes == whole.nic_bytes == 16 * ROW
    assert cost.memory_bytes == whole.memory_bytes == 2 * 16 * ROW
    assert job(chunks).shape.heads == 4 // chunks


def test_all_heads_at_once_cost_what_their_pass_does() -> None:
    assert pipelined(job(1), PASS) is PASS


def test_a_chunk_takes_the_longer_of_its_pass_and_of_what_travels_meanwhile() -> None:
    """Of four the first meets one way in, the last one way out, the others both."""
    come, leave = 3, 1
    links = [LATENCY + heads * ROW / 1e3 for heads in (come, come + leave, come + leave, leave)]
    for took in (2.0, 6.0, 20.0):
        found = pipelined(job(4), replace(PASS, seconds=took))
        assert found.seconds == pytest.approx(sum(max(took, link) for link in links))
    assert (found.compute_s, found.gathered_bytes, found.memory_bytes) == (6.0, 12.0, 7.0)


def test_links_carry_the_pass_beside_the_exchanges() -> None:
    busy = replace(PASS, nic_bytes=5e3)
    links = [LATENCY + 5 + heads * ROW / 1e3 for heads in (6, 2)]
    found = pipelined(job(2), busy)
    assert found.seconds == pytest.approx(sum(links))
    assert found.nic_bytes == 1e4


@pytest.mark.parametrize("computed", (1.0, 5.0, 9.0))
def test_a_pass_waits_for_the_exchanges_that_were_posted_before_its_own_messages(
    computed: float,
) -> None:
    """A step whose hop takes 2 s, and one of 3 s without; on another link the hop does not wait."""
    steps = (Phase("0", Transfer(2.0), (Chunk(computed),)), Phase("1", chunks=(Chunk(3.0),)))
    far, near = Cost(steps, 2e3, 0.0, 0.0), Cost(steps, 0.0, 2e3, 0.0)
    two = job(2)
    sent = [one.nic_bytes / 1e3 for one in trade_costs(two)]
    behind = sum(max(computed, each + 2.0) + 3.0 for each in sent)
    aside = sum(max(max(computed, 2.0) + 3.0, LATENCY + each) for each in sent)
    assert pipelined(two, far).seconds == pytest.approx(behind)
    assert pipelined(two, near).seconds == pytest.approx(aside)
    assert aside < behind - 2.0


def test_what_occupies_a_rank_is_added_to_its_pass() -> None:
    """The exchange's whole time, or what the smallest one takes if that is more."""
    slow = job(2, occupied=1.0)
    come, leave = (one.hold_s for one in trade_costs(slow))
    assert (come, leave) == pytest.approx((LATENCY + 6 * ROW / 1e3, LATENCY + 2 * ROW / 1e3))
    found = pipelined(slow, replace(PASS, seconds=100.0))
    assert found.seconds == pytest.approx(200 + come + leave)
    measured = job(2, occupied=0.5, exchange_s=1e3)
    assert [one.hold_s for one in trade_costs(measured)] == pytest.approx([500, 500])


def test_connections_inside_a_host_carry_the_pass_beside_the_exchanges() -> None:
    """Two hosts of two ranks with a NIC, four of which trade: one neighbour, two far ones."""
    at = replace(AT, ranks_per_host=2, inside=Link(LATENCY, 1.0), between=Link(1e-9, 1e12))
    many = Job(WORK, at, degree=4, chunks=2)
    busy = replace(PASS, inside_bytes=1e6)
    sent = [one.inside_bytes for one in trade_costs(many)]
    found = pipelined(many, busy)
    assert found.seconds == pytest.approx(sum(LATENCY + 1e6 + each for each in sent))


def test_a_rank_is_held_by_its_own_messages_to_all_its_peers() -> None:
    """Not by its neighbour's through the same NIC: its own bytes, three out and three in."""
    at = replace(AT, ranks_per_host=2, inside=Link(LATENCY, 1e3), occupied=1.0)
    for one in trade_costs(Job(WORK, at, degree=4, chunks=2)):
        own = one.inside_bytes + one.nic_bytes / 2
        assert one.hold_s == pytest.approx(3 * LATENCY + own / 1e3)
