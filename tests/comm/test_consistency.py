"""Small tensors of every rank on every rank, in few messages."""

from __future__ import annotations

from math import ceil, log2

import pytest
import torch

from tests.helpers import run_threads
from wf_backends.comm import Communicator, gather_small, sum_over_ranks
from wf_backends.comm import consistency as agree
from wf_backends.comm.consistency import ConsistencyCheck


def exchanged(comm):
    """What a rank finds, and how many messages it sent for it."""
    sent, post = [], comm.post

    def counting(label, sends, recvs):
        sent.extend(sends)
        return post(label, sends, recvs)

    comm.post = counting
    everyone = gather_small(comm, torch.tensor([comm.rank, -comm.rank]))
    return everyone.tolist(), len(sent), sum_over_ranks(comm, torch.tensor(float(comm.rank)))


@pytest.mark.parametrize("size", range(1, 18))
def test_every_rank_finds_all_in_order_with_a_message_for_every_doubling(size):
    for everyone, messages, total in run_threads(size, exchanged):
        assert everyone == [[rank, -rank] for rank in range(size)]
        assert messages == ceil(log2(size))
        assert total == sum(range(size))


def counts_of_checks(comm, on_host):
    """How many messages each check of these batch sizes sent, in order."""
    comm.on_host, posts, post = on_host, [], comm.post

    def counting(label, sends, recvs):
        posts.append(label)
        return post(label, sends, recvs)

    comm.post, agreement, found = counting, ConsistencyCheck(comm), []
    for size in (1, 2, 1, 3, 2, 1, 4, 4):
        before = len(posts)
        told = agreement.check({"batch size": size}, {"rows": comm.rank}, torch.empty(0))
        assert told == {"rows": (0, 1)}
        found.append(len(posts) - before)
    return found


def test_where_a_check_stalls_a_device_only_new_headers_are_compared(monkeypatch):
    """And of those only the latest are remembered, the same on every rank."""
    monkeypatch.setattr(agree, "MAX_REMEMBERED", 2)
    monkeypatch.setattr(
        Communicator, "small_message_device", lambda comm, x: x.device
    )  # no device here
    assert run_threads(2, counts_of_checks, True) == [[1] * 8] * 2
    assert run_threads(2, counts_of_checks, False) == [[1, 1, 0, 1, 0, 1, 1, 0]] * 2


def refused_then_right(comm):
    """A wrong call, and the same call of rank 0 once it is right on both ranks."""
    comm.on_host, agreement = False, ConsistencyCheck(comm)
    with pytest.raises(ValueError, match=r"batch size: \[1, 2\]"):
        agreement.check({"batch size": 1 + comm.rank}, {"rows": 7}, torch.empty(0))
    return agreement.check({"batch size": 1}, {"rows": 7}, torch.empty(0))


def test_a_call_that_was_refused_is_compared_again(monkeypatch):
    monkeypatch.setattr(Communicator, "small_message_device", lambda comm, x: x.device)
    assert run_threads(2, refused_then_right) == [{"rows": (7, 7)}] * 2
