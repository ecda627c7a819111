"""`tests/nccl_queues.py`, which checks every test on threads, finds what would hang over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.cases import Case
from tests.helpers import run_threads
from tests.nccl_queues import Batch, assert_queues_end
from wf_backends.comm import Communicator
from wf_backends.comm.protocol import Pending
from wf_backends.kernels import Scores
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.runtime.attention import AttentionCall, RouteAttention
from wf_backends.schedule.layout import contiguous
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.routes import ring


class Both(Pending):
    def __init__(self, *pending: Pending) -> None:
        self.pending = pending

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()


def attend(comm: Communicator, receives_first: bool) -> None:
    """A ring of attention whose posts are two: in one order on all ranks, or not."""
    post = comm._post

    def post_apart(label, sends, recvs):
        received = post(label, [], recvs) if receives_first or comm.rank % 2 else None
        sent = post(label, sends, [])
        return Both(sent, received or post(label, [], recvs))

    comm._post = post_apart
    case = Case(ring(4), ring(4), contiguous(4, 32), Mask())
    call = AttentionCall(*case.programs(comm.rank), comm, ReferenceKernel(), Scores(0.3))
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    RouteAttention.apply(q, k, v, call)


def test_a_ring_in_which_all_ranks_receive_before_they_send_would_hang() -> None:
    """Over gloo and on threads it does not."""
    with pytest.raises(AssertionError, match="over NCCL ranks would wait .*'forward step 0' for"):
        run_threads(4, attend, True)


def test_a_ring_in_which_every_second_rank_sends_first_ends() -> None:
    run_threads(4, attend, False)


def test_two_ranks_that_send_to_each_other_hang_unless_one_batch_also_receives() -> None:
    there, back = (0, 1), (1, 0)
    both = [Batch("a", [there], [back])], [Batch("a", [back], [there])]
    assert_queues_end(both)
    apart = (
        [Batch("a", [there], []), Batch("b", [], [back])],
        [Batch("a", [back], []), Batch("b", [], [there])],
    )
    with pytest.raises(AssertionError, match="0: \"'a' for \\[\\(1, 1\\)\\]\""):
        assert_queues_end(apart)


def test_a_circle_of_three_ranks_is_found() -> None:
    """Each receives from the rank before it, then sends to the rank behind it."""
    queues = [
        [Batch("in", [], [((rank - 1) % 3, rank)]), Batch("out", [(rank, (rank + 1) % 3)], [])]
        for rank in range(3)
    ]
    with pytest.raises(AssertionError, match="over NCCL"):
        assert_queues_end(queues)
    queues[0].reverse()  # one of them sends first
    assert_queues_end(queues)
