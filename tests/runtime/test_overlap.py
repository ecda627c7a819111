"""The order of things: what a step needs next is in flight while the step computes."""

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
from wf_backends.runtime.attention import Attention, Call
from wf_backends.runtime.ulysses import HeadGroup, make_head_exchange
from wf_backends.runtime.ulysses_pipeline import UlyssesAttention
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, Mask
from wf_backends.schedule.ranges import intersect, subtract
from wf_backends.schedule.routes import all_gather, concentric, mesh, ring


class Recorder(Communicator):
    """Another communicator, with a list of what was posted and waited for."""

    def __init__(self, inner, events):
        super().__init__(inner.rank, inner.size)
        self.inner, self.events, self.on_host = inner, events, inner.on_host

    def _post(self, label, sends, recvs):
        self.events.append(f"post {label}")
        pending = self.inner._post(label, sends, recvs)
        return Waited(pending, label, self.events)


class Waited:
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
    events = []
    kernel = RecordedKernel(events)
    q = torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 8, 2, 8, dtype=torch.float64)
    call = Call(*case.programs(comm.rank), Recorder(comm, events), kernel, Scores(0.3))
    Attention.apply(q, kv, kv, call).sum().backward()
    return events


def chunk_events(comm, chunks):
    events, queries = [], zigzag(2, 16)
    trade = make_head_exchange(queries, 12, 12).split(chunks)
    case = Case(ring(1), ring(1), contiguous(1, 16), Mask(CAUSAL))
    recorder = Recorder(comm, events)
    alone, group = recorder.view([comm.rank]), HeadGroup(recorder, trade, trade)
    call = Call(*case.programs(0), alone, RecordedKernel(events), Scores(0.3))
    q, k, v = (torch.randn(1, 8, 12, 8).requires_grad_() for _ in range(3))
    UlyssesAttention.apply(q, k, v, call, group).sum().backward()
    return [kind for kind, _ in groupby(events)]


def test_a_chunk_is_computed_while_the_next_one_comes_and_the_last_one_leaves():
    """Only the first one's way in and the last one's way out hide behind nothing."""
    for events in run_threads(2, chunk_events, 3):
        for way, came, left in (("forward", "qkv", "out"), ("backward", "out", "qkv")):
            come, gone = f"{way} ulysses {came}", f"{way} ulysses {left}"
            wanted = [f"post {come}", f"wait {come}", f"post {come}", "compute", f"post {gone}"]
            wanted += [f"wait {come}", f"post {come}", "compute", f"wait {gone}", f"post {gone}"]
            wanted += [f"wait {come}", "compute", f"wait {gone}", f"post {gone}", f"wait {gone}"]
            half = len(events) // 2
            assert (events[:half] if way == "forward" else events[half:]) == wanted


def test_the_next_hop_is_in_flight_while_a_step_computes():
    case = Case(ring(4), ring(4), zigzag(4, 32), Mask(CAUSAL))
    for events in run_threads(4, events_of, case):
        for name, steps in (("forward", 3), ("backward", 4)):
            for step in range(steps):
                start = events.index(f"post {name} step {step}")
                stop = events.index(f"wait {name} step {step}")
                assert events[start + 1 : stop] == ["compute"], events


def test_a_rank_computes_its_own_queries_while_those_of_others_are_on_their_way():
    """And last those whose results stay, while the other results go home."""
    case = Case(mesh(2, 2), mesh(2, 2), zigzag(4, 32), Mask())
    for events in run_threads(4, events_of, case):
        for name in ("forward", "backward"):
            gather, home = (f"{name} gather", f"{name} home")
            asked, came = events.index(f"post {gather}"), events.index(f"wait {gather}")
            first, second = (events.index(f"{way} {name} step 0") for way in ("post", "wait"))
            assert asked < first < came < second  # the hop is posted with the queries
            assert set(events[first + 1 : came]) == {"compute"}
            assert set(events[came + 1 : second]) == {"compute"}
            left, back = events.index(f"post {home}"), events.index(f"wait {home}")
            assert "compute" in events[left + 1 : back]


def test_a_rank_computes_on_its_own_keys_while_those_of_others_are_on_their_way():
    """All-gather: each owner's keys as they arrive, forward and backward, their gradients too."""
    route = all_gather(4)
    case = Case(
        route, route, zigzag(4, 32), Mask(), queries_walk=True, queries_walk_in_forward=True
    )
    for events in run_threads(4, events_of, case):
        turn = events.index("post backward gather")
        for name, found in (("forward", events[:turn]), ("backward", events[turn:])):
            gather = f"{name} gather"
            own = [f"post {gather}", "compute"]
            assert found.count(own[0]) == 3
            rest = [f"wait {gather}", "compute"] * 3
            kept = {*own, *rest}
            seen = [event for event, _ in groupby(event for event in found if event in kept)]
            assert seen == own + rest
        left = events.index("post backward home")
        assert "compute" in events[left : events.index("wait backward home")]


def test_a_rank_that_only_gives_does_not_wait_for_who_gets_it():
    """Under a causal mask rank 3 reads rank 1's keys in step 2, and rank 1 computes after that."""
    case = Case(ring(4), ring(4), contiguous(4, 32), Mask(CAUSAL))
    events = run_threads(4, events_of, case)[1]
    last = {event: at for at, event in enumerate(events)}
    _, later, *_ = (at for at, event in enumerate(events) if event == "compute")
    assert last["post forward step 1"] < later < last["wait forward step 1"]


@pytest.mark.parametrize(("route", "fetches"), (("all_gather", 3), ("ring", 0)))
def test_a_config_has_keys_come_owner_by_owner(route, fetches):
    def posts(comm):
        words = {"sequence_parallel_size": 4, "route": route, "kernel": "reference"}
        events = []
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), Recorder(comm, events))
        q, k, v = torch.randn(3, 1, 8, 2, 8, dtype=torch.float64)
        sp.attention(q, k, v)
        return events.count("post forward gather")

    assert run_threads(4, posts) == [fetches] * 4


@pytest.mark.parametrize("rank", (0, 2, 3))  # rank 1 meets no key that rank 0's rows see
def test_results_leave_after_the_last_step_that_adds_to_them(rank):
    """In a causal mask the first rows are finished before the last: they do not wait for these."""
    layout = contiguous(4, 32)
    plan = lower(Problem(mesh(2, 2), layout, layout, Mask(CAUSAL)), rank)
    rounds = [(at, one) for at, step in enumerate(plan.steps) for one in step.rounds]
    assert any(one.home.send for _, one in rounds)
    for step, one in rounds:
        for parcel in one.home.send:
            later = [t for after in plan.steps[step + 1 :] for t in after.tiles]
            assert not any(intersect(tile.rows, parcel.rows) for tile in later)
            assert any(not subtract(tile.rows, parcel.rows) for tile in one.tiles)


@pytest.mark.parametrize("size", (2, 3, 4, 6, 8, 12))
def test_owners_take_turns(size):
    """In every round a rank sends as much as it receives, of powers of two to whom it receives."""
    layout = zigzag(size, 8 * size)
    problem = Problem(mesh(size, 1), layout, layout, Mask())
    for rank in range(size):
        for one in lower(problem, rank).steps[0].rounds:
            to, of = (
                {parcel.peer for parcel in way} for way in (one.fetch.send, one.fetch.receive)
            )
            assert len(to) == len(of) and (to == of or size in (3, 6, 12))


def test_many_owners_share_rounds():
    layout = zigzag(16, 64)
    plan = lower(Problem(mesh(16, 1), layout, layout, Mask()), 3)
    (step,) = plan.steps
    assert [len(one.fetch.receive) for one in step.rounds] == [0, 5, 5, 5]
    assert [len(one.home.send) for one in step.rounds] == [0, 5, 5, 5]


def test_a_call_makes_the_messages_of_its_schedule_and_no_more():
    """Moments at which messages are posted, as in PyTorch's counts of collectives."""
    ring_case = Case(ring(4), ring(4), zigzag(4, 32), Mask())
    team_case = Case(concentric(4, 2), concentric(4, 2), zigzag(4, 32), Mask())
    ring_posts = 3 + 4 + 1  # forward hops; backward hops with gradients behind; the last way home
    team_posts = 3 + 3  # keys gathered, queries gathered, results home; the same backward ...
    team_posts += 1  # ... and the keys' gradients home
    for case, posts in ((ring_case, ring_posts), (team_case, team_posts)):
        for events in run_threads(4, events_of, case):
            posted = [event for event in events if event.startswith("post")]
            assert len(posted) == posts, posted
