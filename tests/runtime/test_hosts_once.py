"""`host_size`, with which a row crosses to a host once: exact, and fewer bytes through each NIC."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.cases import Case, assert_exact, schedules
from tests.helpers import run_threads
from tests.slices import SEQLEN, SLICES
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.comm.protocol import View
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.plan import Choice
from wf_backends.planner.search import price_plan
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.placement import place, read_placed

SIZES = ((4, 2), (8, 4), (6, 4))  # (ranks, ranks of a host); of 6 ranks the second host has 2
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(7, 0)),
    "documents": Mask(CAUSAL, (0, 3, 4, 20, SEQLEN)),
}
GATHERING = [
    pytest.param(schedule, host_size, id=f"{name}({n})-hosts-of-{host_size}")
    for n, host_size in SIZES
    for name, schedule in schedules(n).items()
    if "ring" not in name
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "host_size"), GATHERING)
def test_crossing_once_is_exact_whichever_side_walks(schedule, host_size, mask):
    layout = (contiguous if mask == "window" else zigzag)(schedule.num_ranks, SEQLEN)
    case = Case(schedule, schedule, layout, MASKS[mask], host_size=host_size)
    for walk in (False, True):
        case = replace(case, queries_walk=walk, queries_walk_in_forward=walk)
        assert_exact(case)
        if mask == "causal":
            assert_exact(replace(case, keep=True, sinks=True))


@pytest.mark.parametrize("name", SLICES)
def test_crossing_once_is_exact_under_slices(name):
    mask = make_mask(**SLICES[name])
    layout = make_layout("balanced", 8, SEQLEN, slices=mask.slices)
    for route in ({"name": "all_gather"}, {"name": "mesh", "rows": 4, "cols": 2, "order": [1, 0]}):
        schedule = place(read_placed(route, 8), 8)
        walk = route["name"] == "all_gather"
        case = Case(schedule, schedule, layout, mask, walk, queries_walk_in_forward=walk)
        assert_exact(replace(case, host_size=4))


class CountingNic(View):
    """A communicator that counts the bytes "out" and "in" between this rank and other hosts."""

    def __init__(self, comm, ranks_per_host, nic_bytes):
        super().__init__(comm, range(comm.size))
        self.ranks_per_host, self.nic_bytes = ranks_per_host, nic_bytes

    def view(self, ranks):
        return self if list(ranks) == list(range(self.size)) else View(self, ranks)

    def _post(self, label, sends, recvs):
        host = self.rank // self.ranks_per_host
        for direction, messages in (("out", sends), ("in", recvs)):
            for peer, tensor in messages:
                if peer // self.ranks_per_host != host and "agree" not in label:
                    self.nic_bytes[direction] += tensor.numel() * tensor.element_size()
        return self.parent._post(label, sends, recvs)


ROWS, HEADS, HEAD_DIM = 16, 4, 8  # of a rank


def counted_bytes(ranks_per_host: int, config: SequenceParallelConfig) -> int:
    """Through the busiest NIC, one NIC a rank, in a forward and a backward under a full mask."""

    def rank(comm):
        nic_bytes = Counter()
        sp = SequenceParallel(config, CountingNic(comm, ranks_per_host, nic_bytes))
        q, k, v = (torch.randn(1, ROWS, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
        sp.attention(q, k, v)  # the first call exchanges headers, too
        nic_bytes.clear()
        sp.attention(q, k, v).sum().backward()
        return max(nic_bytes.values())

    return max(run_threads(config.sequence_parallel_size, rank))


def predicted_bytes(ranks_per_host: int, config: SequenceParallelConfig) -> float:
    """The planner's figure for the same call."""
    size = config.sequence_parallel_size
    rates = (("reference", KernelRate(1e9, 1e9)),)
    inside, between = Link(1e-6, 1e9), Link(1e-6, 1e7)
    hosts = size // ranks_per_host
    topology = Topology(
        "hosts", hosts, ranks_per_host, ranks_per_host, inside, between, rates, 1e12
    )
    shape = Shape(1, HEADS, HEADS, HEAD_DIM, 4)
    request = request_of(config, shape, size * ROWS, Mask(FULL), topology)
    (forward,), (backward,) = request.forward, request.backward
    choice = Choice(config.degrees[0], forward, backward, *request.moves)
    return price_plan(replace(request, exact_up_to=size), choice).cost.nic_bytes


@pytest.mark.parametrize(("hosts", "ranks_per_host"), ((2, 2), (2, 4), (4, 4)))
@pytest.mark.parametrize("name", ("all_gather", "mesh"))
def test_crossing_once_divides_the_bytes_through_each_nic(hosts, ranks_per_host, name):
    """By the ranks of a host, which all read each row. The planner predicts both figures."""
    size = hosts * ranks_per_host
    route = {"name": name} | ({"rows": size, "cols": 1} if name == "mesh" else {})
    moves = "queries" if name == "all_gather" else "keys"
    to_every_rank, once_a_host = (
        SequenceParallelConfig.from_dict(
            {"sequence_parallel_size": size, "route": route | option, "backward_moves": moves}
        )
        for option in ({}, {"host_size": ranks_per_host})
    )
    repeated = counted_bytes(ranks_per_host, to_every_rank)
    once = counted_bytes(ranks_per_host, once_a_host)
    assert once * ranks_per_host == repeated
    assert repeated == predicted_bytes(ranks_per_host, to_every_rank)
    assert once == predicted_bytes(ranks_per_host, once_a_host)
