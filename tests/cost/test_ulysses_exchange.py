"""The bytes and the seconds of a Ulysses exchange, against those of the runtime's exchange and
those counted message by message."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.cost.passes import SHAPE
from tests.planning import lab_cluster
from wf_backends.cost.simulator import LinkEnd, link_ends
from wf_backends.cost.ulysses import exchange_bytes, exchange_seconds, ulysses_cost
from wf_backends.cost.workload import HeadSplit, Workload
from wf_backends.runtime.ulysses import make_head_exchange
from wf_backends.schedule.layout import make_layout


def bytes_to_a_peer(split: HeadSplit) -> int:
    """Of q, k and v, and of out, that a rank sends to each other rank of its group."""
    rows = split.workload.seqlen // split.topology.size
    return rows * SHAPE.head_dim * SHAPE.itemsize * 2 * (split.shape.heads + split.shape.kv_heads)


def bytes_by_link_end(split: HeadSplit) -> Counter[LinkEnd]:
    """What all exchanges send through each end of a link, counted message by message."""
    sent = Counter[LinkEnd]()
    for group in range(split.groups.count):
        members = split.groups.members(group)
        for source in members:
            for target in set(members) - {source}:
                for end in link_ends(split.topology, source, target):
                    sent[end] += bytes_to_a_peer(split)
    return sent


@pytest.mark.parametrize("direct_links", (False, True))
@pytest.mark.parametrize(
    ("hosts", "ranks", "nics", "degree", "stride"),
    [(2, 4, 1, 4, 1), (2, 4, 2, 4, 2), (4, 2, 2, 4, 2), (4, 4, 4, 4, 4), (4, 4, 1, 8, 2)]
    + [(4, 4, 2, 2, 2), (4, 4, 2, 2, 4), (2, 8, 8, 4, 4)]
    + [(2, 3, 1, 2, 1), (3, 8, 1, 6, 1), (3, 8, 8, 12, 1), (3, 2, 1, 3, 1), (2, 6, 6, 2, 2)],
)
def test_bytes_of_the_busiest_links_are_counted_message_by_message(
    hosts: int, ranks: int, nics: int, degree: int, stride: int, direct_links: bool
) -> None:
    """The last ones have groups that are on two hosts, but not whole."""
    topology = replace(lab_cluster(hosts, ranks, nics), direct_links=direct_links)
    split = HeadSplit(Workload(SHAPE, 96), topology, degree, stride)
    cost, sent = ulysses_cost(split), bytes_by_link_end(split)
    nic_bytes, inside_bytes = (
        max((num_bytes for end, num_bytes in sent.items() if end[0] == is_nic), default=0)
        for is_nic in (True, False)
    )
    assert (cost.nic_bytes, cost.inside_bytes) == (nic_bytes, inside_bytes)


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 4), (4, 4), (8, 4), (8, 1)])
@pytest.mark.parametrize("keys", [96, 32])
def test_bytes_are_those_of_the_runtimes_exchange(degree: int, kv_heads: int, keys: int) -> None:
    shape = replace(SHAPE, kv_heads=kv_heads)
    split = HeadSplit(Workload(shape, 96, keys=keys), lab_cluster(8, 1, 1), degree)
    layout = make_layout("zigzag", 8, 96)[:degree]
    sent = 0
    for heads, rows in ((8, 12), (kv_heads, keys // 8), (kv_heads, keys // 8), (8, 12)):
        exchange = make_head_exchange(layout, heads, 8)  # q, k, v and then out
        heads_of_peers = sum(stop - start for start, stop in exchange.heads[1:])
        sent += heads_of_peers * rows * shape.head_dim * shape.itemsize
    assert ulysses_cost(split).nic_bytes == sent
    assert split.shape.kv_heads == make_head_exchange(layout, kv_heads, 8).heads[0][1]


def test_an_exchange_takes_the_measured_time_in_place_of_the_latency() -> None:
    split = HeadSplit(Workload(SHAPE, 96), lab_cluster(2, 4, 1), 4)
    measured = replace(split, topology=replace(split.topology, exchange_s=0.5))
    for load, span in zip(exchange_bytes(split), ulysses_cost(measured).spans, strict=True):
        without_latency_s = exchange_seconds(split, load) - split.topology.inside.latency_s
        assert span.stop - span.start == pytest.approx(without_latency_s + 0.5)


def test_a_measured_time_below_the_latency_changes_nothing() -> None:
    split = HeadSplit(Workload(SHAPE, 96), lab_cluster(2, 4, 1), 4)
    measured = replace(split, topology=replace(split.topology, exchange_s=1e-12))
    assert ulysses_cost(measured) == ulysses_cost(split)
