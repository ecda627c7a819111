"""The cost of trading heads for tokens in chunks, and the part of it that passes hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.cost.ulysses import (
    exchange_bytes,
    exchange_hold_s,
    min_exchange_s,
    pipelined,
    ulysses_cost,
)
from wf_backends.cost.workload import Cost, HeadSplit, Workload
from wf_backends.lowering.message_bytes import Shape

RATES = (("sdpa", KernelRate(1e9, 1e9)),)
LATENCY = 0.5
TWO_HOSTS = Topology("two hosts", 2, 1, 1, Link(1e-9, 1e12), Link(LATENCY, 1e3), RATES, 1e9)
WORKLOAD = Workload(Shape(1, 8, 8, 16, itemsize=4), 64)
HEAD = 32 * 16 * 4  # bytes of one head of the 32 rows of a rank
PASS = Cost(seconds=2.0, compute_s=1.5, memory_bytes=7.0, gathered_bytes=3.0)


def in_chunks(chunks: int, **changes: float) -> HeadSplit:
    """Two ranks on two hosts, 4 of 8 query heads and of 8 key heads each.

    q, k and v are 12 heads that a rank sends to the other one, out is 4 heads.
    """
    return HeadSplit(WORKLOAD, replace(TWO_HOSTS, **changes), degree=2, chunks=chunks)


@pytest.mark.parametrize("chunks", (1, 2, 4))
def test_only_the_first_exchange_in_and_the_last_one_out_are_exposed(chunks: int) -> None:
    split = in_chunks(chunks)
    cost, at_once = ulysses_cost(split), ulysses_cost(in_chunks(1))
    assert [span.label for span in cost.spans] == ["ulysses qkv", "ulysses out"]
    for span, heads in zip(cost.spans, (12, 4), strict=True):
        assert span.stop - span.start == pytest.approx(LATENCY + heads / chunks * HEAD / 1e3)
    assert cost.nic_bytes == at_once.nic_bytes == 16 * HEAD
    assert cost.memory_bytes == at_once.memory_bytes == 2 * 16 * HEAD
    assert split.shape.heads == 4 // chunks


def test_a_pass_over_all_heads_at_once_costs_what_it_costs_alone() -> None:
    assert pipelined(in_chunks(1), PASS) is PASS


@pytest.mark.parametrize("pass_s", (2.0, 6.0, 20.0))
def test_a_chunk_takes_the_longer_of_its_pass_and_of_the_exchanges_beside_it(pass_s) -> None:
    """Beside the first of four is an exchange in, beside the last one out, beside others both."""
    qkv, out = 3, 1  # heads of a chunk
    links_s = [LATENCY + heads * HEAD / 1e3 for heads in (qkv, qkv + out, qkv + out, out)]
    cost = pipelined(in_chunks(4), replace(PASS, seconds=pass_s))
    assert cost.seconds == pytest.approx(sum(max(pass_s, link_s) for link_s in links_s))
    assert (cost.compute_s, cost.gathered_bytes, cost.memory_bytes) == (6.0, 12.0, 7.0)


def test_nics_carry_the_pass_beside_the_exchanges() -> None:
    links_s = [LATENCY + 5 + heads * HEAD / 1e3 for heads in (6, 2)]
    cost = pipelined(in_chunks(2), replace(PASS, nic_bytes=5e3))
    assert cost.seconds == pytest.approx(sum(links_s))
    assert cost.nic_bytes == 1e4


def test_links_inside_a_host_carry_the_pass_beside_the_exchanges() -> None:
    """Two hosts of two ranks, four of which trade: one neighbour and two peers on another host."""
    topology = replace(
        TWO_HOSTS, ranks_per_host=2, inside=Link(LATENCY, 1.0), between=Link(1e-9, 1e12)
    )
    split = HeadSplit(WORKLOAD, topology, degree=4, chunks=2)
    links_s = [LATENCY + 1e6 + load.inside for load in exchange_bytes(split)]
    cost = pipelined(split, replace(PASS, inside_bytes=1e6))
    assert cost.seconds == pytest.approx(sum(links_s))


def test_the_time_for_which_an_exchange_occupies_a_rank_is_added_to_its_pass() -> None:
    split = in_chunks(2, occupied=1.0)
    qkv_s, out_s = (exchange_hold_s(split, load) for load in exchange_bytes(split))
    assert (qkv_s, out_s) == pytest.approx((LATENCY + 6 * HEAD / 1e3, LATENCY + 2 * HEAD / 1e3))
    cost = pipelined(split, replace(PASS, seconds=100.0))
    assert cost.seconds == pytest.approx(200 + qkv_s + out_s)


def test_an_exchange_occupies_a_rank_for_its_share_of_the_measured_time() -> None:
    split = in_chunks(2, occupied=0.5, exchange_s=1e3)
    hold_s = [exchange_hold_s(split, load) for load in exchange_bytes(split)]
    assert hold_s == pytest.approx([500, 500])


def test_without_a_measured_time_messages_of_an_exchange_count_one_by_one() -> None:
    """q, k and v to three peers and from three peers: each message occupies the rank for half of
    its latency."""
    topology = replace(
        TWO_HOSTS, hosts=1, ranks_per_host=4, inside=Link(LATENCY, 1e12), occupied=1.0
    )
    split = HeadSplit(WORKLOAD, topology, degree=4)
    assert min_exchange_s(split) == pytest.approx(9 * LATENCY)
    assert ulysses_cost(split).seconds == pytest.approx(2 * 9 * LATENCY)
    assert exchange_hold_s(split, exchange_bytes(split)[0]) == pytest.approx(9 * LATENCY)
    measured = replace(split, topology=replace(topology, exchange_s=0.25))
    assert min_exchange_s(measured) == 0.25
    unoccupied = replace(split, topology=replace(topology, occupied=0.0))
    assert ulysses_cost(unoccupied).seconds == pytest.approx(2 * LATENCY)


def test_a_rank_is_occupied_by_its_own_messages_alone() -> None:
    """Three out and three in; not by those of its neighbour, with which it shares a NIC."""
    topology = replace(TWO_HOSTS, ranks_per_host=2, inside=Link(LATENCY, 1e3), occupied=1.0)
    split = HeadSplit(WORKLOAD, topology, degree=4, chunks=2)
    for load in exchange_bytes(split):
        own_bytes = load.inside + load.nic / 2
        assert exchange_hold_s(split, load) == pytest.approx(3 * LATENCY + own_bytes / 1e3)
