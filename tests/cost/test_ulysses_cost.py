"""What trading heads for tokens costs in chunks, and what of it the passes hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.cost.ulysses import (
    exchange_hold_s,
    exchange_loads,
    min_exchange_s,
    pipelined,
    ulysses_cost,
)
from wf_backends.cost.workload import Cost, HeadSplit, Workload
from wf_backends.lowering.message_bytes import Shape

RATES = (("sdpa", KernelRate(1e9, 1e9)),)
LATENCY = 0.5
AT = Topology("two hosts", 2, 1, 1, Link(1e-9, 1e12), Link(LATENCY, 1e3), RATES, 1e9)
WORK = Workload(Shape(1, 8, 8, 16, itemsize=4), 64)
ROW = 32 * 16 * 4  # bytes of one head of a rank's rows
PASS = Cost(seconds=2.0, compute_s=1.5, memory_bytes=7.0, gathered_bytes=3.0)


def job(chunks: int, **changes: float) -> HeadSplit:
    return HeadSplit(WORK, replace(AT, **changes), degree=2, chunks=chunks)


@pytest.mark.parametrize("chunks", (1, 2, 4))
def test_only_one_way_in_and_one_way_out_hide_behind_nothing(chunks: int) -> None:
    whole, cost = ulysses_cost(job(1)), ulysses_cost(job(chunks))
    assert [span.label for span in cost.spans] == ["ulysses qkv", "ulysses out"]
    for span, heads in zip(cost.spans, (12, 4), strict=True):
        assert span.stop - span.start == pytest.approx(LATENCY + heads / chunks * ROW / 1e3)
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


def test_what_occupies_a_rank_is_added_to_its_pass() -> None:
    """The exchange's whole time, or what the smallest one takes if that is more."""
    slow = job(2, occupied=1.0)
    come, leave = (exchange_hold_s(slow, one) for one in exchange_loads(slow))
    assert (come, leave) == pytest.approx((LATENCY + 6 * ROW / 1e3, LATENCY + 2 * ROW / 1e3))
    found = pipelined(slow, replace(PASS, seconds=100.0))
    assert found.seconds == pytest.approx(200 + come + leave)
    measured = job(2, occupied=0.5, exchange_s=1e3)
    held = [exchange_hold_s(measured, one) for one in exchange_loads(measured)]
    assert held == pytest.approx([500, 500])


def test_where_no_exchange_was_measured_its_messages_count_one_by_one() -> None:
    """q, k and v to three peers and from them: each takes half a latency of the rank."""
    at = replace(AT, hosts=1, ranks_per_host=4, inside=Link(LATENCY, 1e12), occupied=1.0)
    four = HeadSplit(WORK, at, degree=4)
    assert min_exchange_s(four) == pytest.approx(9 * LATENCY)
    assert ulysses_cost(four).seconds == pytest.approx(2 * 9 * LATENCY)
    assert exchange_hold_s(four, exchange_loads(four)[0]) == pytest.approx(9 * LATENCY)
    assert min_exchange_s(replace(four, topology=replace(at, exchange_s=0.25))) == 0.25
    free = replace(four, topology=replace(at, occupied=0.0))
    assert ulysses_cost(free).seconds == pytest.approx(2 * LATENCY)


def test_connections_inside_a_host_carry_the_pass_beside_the_exchanges() -> None:
    """Two hosts of two ranks with a NIC, four of which trade: one neighbour, two far ones."""
    at = replace(AT, ranks_per_host=2, inside=Link(LATENCY, 1.0), between=Link(1e-9, 1e12))
    many = HeadSplit(WORK, at, degree=4, chunks=2)
    busy = replace(PASS, inside_bytes=1e6)
    sent = [one.inside for one in exchange_loads(many)]
    found = pipelined(many, busy)
    assert found.seconds == pytest.approx(sum(LATENCY + 1e6 + each for each in sent))


def test_a_rank_is_held_by_its_own_messages_to_all_its_peers() -> None:
    """Not by its neighbour's through the same NIC: its own bytes, three out and three in."""
    at = replace(AT, ranks_per_host=2, inside=Link(LATENCY, 1e3), occupied=1.0)
    split = HeadSplit(WORK, at, degree=4, chunks=2)
    for one in exchange_loads(split):
        own = one.inside + one.nic / 2
        assert exchange_hold_s(split, one) == pytest.approx(3 * LATENCY + own / 1e3)
