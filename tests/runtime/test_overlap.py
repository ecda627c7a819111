"""Overlap: the order in which a rank posts messages, computes tiles and waits.

What a step needs next is in flight while the step computes, results leave as soon as they are
final, and no message is posted that the schedule does not name.
"""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from tests.cases import Case
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.kernels import Scores
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.runtime.attention import AttentionCall, RouteAttention
from wf_backends.runtime.ulysses import HeadGroup, make_head_exchange
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.ranges import intersect, subtract
from wf_backends.schedule.routes import all_gather, concentric, mesh, ring


class Recorder(Communicator):
    """Another communicator that records when messages are posted and waited for."""

    def __init__(self, inner, events):
        super().__init__(inner.rank, inner.size)
        self.inner, self.events, self.on_host = inner, events, inner.on_host

    def _post(self, label, sends, recvs):
        self.events.append(f"post {label}")
        return RecordedPending(self.inner._post(label, sends, recvs), label, self.events)


class RecordedPending:
    def __init__(self, pending, label, events):
        self.pending, self.label, self.events = pending, label, events

    def poll(self):
        self.pending.poll()

    def wait(self):
        self.pending.wait()
        self.events.append(f"wait {self.label}")


class RecordedKernel(ReferenceKernel):
    def __init__(self, events):
        self.events = events

    def forward(self, *args):
        self.events.append("compute")
        return super().forward(*args)

    def backward(self, *args):
        self.events.append("compute")
        return super().backward(*args)


def events_of(comm, case):
    """The events of a rank in a forward and a backward, in order."""
    events = []
    kernel = RecordedKernel(events)
    q = torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 8, 2, 8, dtype=torch.float64)
    call = AttentionCall(*case.programs(comm.rank), Recorder(comm, events), kernel, Scores(0.3))
    RouteAttention.apply(q, kv, kv, call).sum().backward()
    return events


def events_of_chunks(comm, chunks):
    """Events of Ulysses in chunks of heads; equal events after one another count as one."""
    events, layout = [], zigzag(2, 16)
    exchange = make_head_exchange(layout, 12, 12).split(chunks)
    case = Case(ring(1), ring(1), contiguous(1, 16), Mask(CAUSAL))
    recorder = Recorder(comm, events)
    own_ring, group = recorder.view([comm.rank]), HeadGroup(recorder, exchange, exchange)
    kernel, programs = RecordedKernel(events), case.programs(0)
    call = AttentionCall(*programs, own_ring, kernel, Scores(0.3), group=group)
    q, k, v = (torch.randn(1, 8, 12, 8).requires_grad_() for _ in range(3))
    RouteAttention.apply(q, k, v, call).sum().backward()
    return [event for event, _ in groupby(events)]


def test_a_chunk_is_computed_while_the_next_arrives_and_the_last_leaves():
    """Only the arrival of the first and the departure of the last of three chunks are exposed."""

    def three_chunks(arrival, departure):
        return [
            *(f"post {arrival}", f"wait {arrival}"),
            *(f"post {arrival}", "compute", f"post {departure}", f"wait {arrival}"),
            *(f"post {arrival}", "compute", f"wait {departure}"),
            *(f"post {departure}", f"wait {arrival}"),
            *("compute", f"wait {departure}"),
            *(f"post {departure}", f"wait {departure}"),
        ]

    for events in run_threads(2, events_of_chunks, 3):
        forward = three_chunks("forward ulysses qkv", "forward ulysses out")
        backward = three_chunks("backward ulysses out", "backward ulysses qkv")
        assert events == forward + backward


def test_the_next_hop_is_in_flight_while_a_step_computes():
    case = Case(ring(4), ring(4), zigzag(4, 32), Mask(CAUSAL))
    for events in run_threads(4, events_of, case):
        for name, hops in (("forward", 3), ("backward", 4)):
            for hop in range(hops):
                post = events.index(f"post {name} step {hop}")
                wait = events.index(f"wait {name} step {hop}")
                assert events[post + 1 : wait] == ["compute"], events


def test_own_queries_are_computed_while_those_of_others_arrive():
    """And results that stay are computed while those of others leave."""
    case = Case(mesh(4, 2, 2), mesh(4, 2, 2), zigzag(4, 32), Mask())
    for events in run_threads(4, events_of, case):
        for name in ("forward", "backward"):
            post_queries, wait_queries, post_hop, wait_hop, post_reduce, wait_reduce = (
                events.index(f"{action} {name} {message}")
                for message in ("gather", "step 0", "reduce")
                for action in ("post", "wait")
            )
            assert post_queries < post_hop < wait_queries < wait_hop  # the hop is posted at once
            assert set(events[post_hop + 1 : wait_queries]) == {"compute"}
            assert set(events[wait_queries + 1 : wait_hop]) == {"compute"}
            assert "compute" in events[post_reduce + 1 : wait_reduce]


def test_own_keys_are_computed_while_those_of_others_arrive():
    """All-gather: the keys of each owner as they arrive. Gradients leave while others compute."""
    route = all_gather(4)
    case = Case(
        route, route, zigzag(4, 32), Mask(), queries_walk=True, queries_walk_in_forward=True
    )
    for events in run_threads(4, events_of, case):
        start_of_backward = events.index("post backward gather")
        passes = {"forward": events[:start_of_backward], "backward": events[start_of_backward:]}
        for name, events_of_pass in passes.items():
            post, wait = f"post {name} gather", f"wait {name} gather"
            assert events_of_pass.count(post) == 3
            relevant = [event for event in events_of_pass if event in {post, wait, "compute"}]
            order = [event for event, _ in groupby(relevant)]
            assert order == [post, "compute", *3 * [wait, "compute"]]
        post_reduce = events.index("post backward reduce")
        assert "compute" in events[post_reduce : events.index("wait backward reduce")]


@pytest.mark.parametrize(("route", "fetches"), (("all_gather", 3), ("ring", 0)))
def test_all_gather_fetches_the_keys_of_each_owner_separately(route, fetches):
    def count_fetches(comm):
        config = SequenceParallelConfig(sequence_parallel_size=4, route=route, kernel="reference")
        events = []
        sp = SequenceParallel(config, Recorder(comm, events))
        q, k, v = torch.randn(3, 1, 8, 2, 8, dtype=torch.float64)
        sp.attention(q, k, v)
        return events.count("post forward gather")

    assert run_threads(4, count_fetches) == [fetches] * 4


def rounds_of(program):
    """(index of the step, round) of all rounds."""
    return [(i, round_) for i, step in enumerate(program.steps) for round_ in step.rounds]


@pytest.mark.parametrize("rank", (0, 2, 3))  # rank 1 has no key that the rows of rank 0 see
def test_results_leave_after_the_last_step_that_adds_to_them(rank):
    """Under a causal mask those of the first rows leave before those of the last."""
    layout = contiguous(4, 32)
    program = lower(Problem(mesh(4, 2, 2), layout, layout, Mask(CAUSAL)), rank)
    assert any(round_.reduce.send for _, round_ in rounds_of(program))
    for i, round_ in rounds_of(program):
        later_tiles = [tile for j, later in rounds_of(program) if j > i for tile in later.tiles]
        for parcel in round_.reduce.send:
            assert not any(intersect(tile.rows, parcel.rows) for tile in later_tiles)
            assert any(not subtract(tile.rows, parcel.rows) for tile in round_.tiles)


@pytest.mark.parametrize("size", (2, 3, 4, 6, 8, 12))
def test_a_rank_sends_to_as_many_ranks_as_it_receives_from_in_every_round(size):
    """To the ranks that it receives from, where the number of ranks is a power of two."""
    layout = zigzag(size, 8 * size)
    problem = Problem(mesh(size, size, 1), layout, layout, Mask())
    for rank in range(size):
        all_senders = set()
        for round_ in lower(problem, rank).steps[0].rounds:
            receivers = {parcel.peer for parcel in round_.fetch.send}
            senders = {parcel.peer for parcel in round_.fetch.receive}
            assert len(receivers) == len(senders)
            assert receivers == senders or size in (3, 6, 12)
            all_senders |= senders
        assert all_senders == set(range(size)) - {rank}


def test_the_15_other_owners_of_16_share_three_rounds():
    layout = zigzag(16, 64)
    program = lower(Problem(mesh(16, 16, 1), layout, layout, Mask()), 3)
    (step,) = program.steps
    assert [len(round_.fetch.receive) for round_ in step.rounds] == [0, 5, 5, 5]
    assert [len(round_.reduce.send) for round_ in step.rounds] == [0, 5, 5, 5]


@pytest.mark.parametrize(
    ("schedule", "num_posts"),
    (
        (ring(4), 3 + 4 + 1),  # forward hops; backward hops with gradients; gradients to owners
        # keys gathered, queries gathered, results reduced; as much in the backward; key gradients
        (concentric(4, 2), 3 + 3 + 1),
    ),
    ids=("ring", "concentric"),
)
def test_a_call_posts_as_often_as_its_schedule_demands(schedule, num_posts):
    case = Case(schedule, schedule, zigzag(4, 32), Mask())
    for events in run_threads(4, events_of, case):
        posts = [event for event in events if event.startswith("post")]
        assert len(posts) == num_posts, posts
