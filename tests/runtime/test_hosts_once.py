"""Rows that cross to a host once: exact in float64 on threads, and the bytes of each NIC."""

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
from wf_backends.comm import View
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.plan import Choice
from wf_backends.planner.search import price_plan
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.placement import place, read_placed

HOSTS = ((4, 2), (8, 4), (6, 4))  # ranks, ranks of a host
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(7, 0)),
    "documents": Mask(CAUSAL, (0, 3, 4, 20, SEQLEN)),
}
GATHERING = [
    pytest.param(schedule, host_size, id=f"{name}({n})-hosts-of-{host_size}")
    for n, host_size in HOSTS
    for name, schedule in schedules(n).items()
    if "ring" not in name
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "host_size"), GATHERING)
def test_exact_forward_and_backward(schedule, host_size, mask):
    """Whichever side stays; and what was gathered may be kept for the backward."""
    layout = (contiguous if mask == "window" else zigzag)(schedule.num_ranks, SEQLEN)
    case = Case(schedule, schedule, layout, MASKS[mask], host_size=host_size)
    for walks in (False, True):
        turned = replace(case, queries_walk=walks, queries_walk_in_forward=walks)
        assert_exact(turned)
        if mask == "causal":
            assert_exact(replace(turned, keep=True, sinks=True))


@pytest.mark.parametrize("name", SLICES)
def test_exact_under_slices(name):
    mask = make_mask(**SLICES[name])
    layout = make_layout("balanced", 8, SEQLEN, slices=mask.slices)
    for route in ({"name": "all_gather"}, {"name": "mesh", "rows": 4, "cols": 2, "order": [1, 0]}):
        schedule = place(read_placed(route, 8), 8)
        stays = route["name"] == "all_gather"
        case = Case(schedule, schedule, layout, mask, stays, queries_walk_in_forward=stays)
        assert_exact(replace(case, host_size=4))


class Counting(View):
    """A communicator that counts the bytes that go out through each NIC, and in; one a rank."""

    def __init__(self, comm, per_host, nics):
        super().__init__(comm, range(comm.size))
        self.per_host, self.nics = per_host, nics

    def view(self, ranks):
        return self if list(ranks) == list(range(self.size)) else View(self, ranks)

    def _post(self, label, sends, recvs):
        for way, messages in (("out", sends), ("in", recvs)):
            for peer, tensor in messages:
                if peer // self.per_host != self.rank // self.per_host and "agree" not in label:
                    self.nics[way] += tensor.numel() * tensor.element_size()
        return self.parent._post(label, sends, recvs)


def nic_bytes(hosts: int, per_host: int, words: dict) -> tuple[int, float]:
    """(counted, predicted) through the busiest NIC, forward and backward, one NIC a rank."""
    size, rows, heads, width = hosts * per_host, 16, 4, 8
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **words})
    mask = Mask(FULL)

    def one_rank(comm):
        nics = Counter()
        sp = SequenceParallel(config, Counting(comm, per_host, nics))
        q, k, v = (torch.randn(1, rows, heads, width, requires_grad=True) for _ in range(3))
        sp.attention(q, k, v)  # headers are exchanged once
        nics.clear()
        sp.attention(q, k, v).sum().backward()
        return max(nics.values())

    rates = (("reference", KernelRate(1e9, 1e9)),)
    near, far = Link(1e-6, 1e9), Link(1e-6, 1e7)
    topology = Topology("hosts", hosts, per_host, per_host, near, far, rates, 1e12)
    shape = Shape(1, heads, heads, width, 4)
    request = request_of(config, shape, size * rows, mask, topology)
    degree = config.degrees[0]
    (forward,), (backward,) = request.forward, request.backward
    plan = price_plan(
        replace(request, exact_up_to=size), Choice(degree, forward, backward, *request.moves)
    )
    return max(run_threads(size, one_rank)), plan.cost.nic_bytes


@pytest.mark.parametrize(("hosts", "per_host"), ((2, 2), (2, 4), (4, 4)))
@pytest.mark.parametrize("name", ("all_gather", "mesh"))
def test_bytes_through_each_nic_drop_by_the_readers_of_a_host(hosts, per_host, name):
    """As many as the planner counts; one of the k that each row and each result took before."""
    size = hosts * per_host
    route = {"name": name} | ({"rows": size, "cols": 1} if name == "mesh" else {})
    moves = "queries" if name == "all_gather" else "keys"
    several, once = (
        nic_bytes(hosts, per_host, {"route": {**route, **told}, "backward_moves": moves})
        for told in ({}, {"host_size": per_host})
    )
    assert several[0] == several[1] and once[0] == once[1]
    assert once[0] * per_host == several[0]
