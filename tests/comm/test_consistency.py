"""Agreement of ranks: gathering small tensors in few messages, and checks of headers."""

from __future__ import annotations

from math import ceil, log2

import pytest
import torch

from tests.helpers import run_threads
from wf_backends.comm import Communicator, gather_small, sum_over_ranks
from wf_backends.comm import consistency as consistency_module
from wf_backends.comm.consistency import ConsistencyCheck


def record_sends(comm):
    """The sends of each later post of the communicator, in a list that grows."""
    posts, post = [], comm.post

    def recording_post(label, sends, recvs):
        posts.append(sends)
        return post(label, sends, recvs)

    comm.post = recording_post
    return posts


def gather_ranks(comm):
    """(gathered tensors, messages sent for them, sum of the ranks)."""
    posts = record_sends(comm)
    gathered = gather_small(comm, torch.tensor([comm.rank, -comm.rank]))
    num_messages = sum(map(len, posts))
    return gathered.tolist(), num_messages, sum_over_ranks(comm, torch.tensor(float(comm.rank)))


@pytest.mark.parametrize("size", range(1, 18))
def test_gather_small_sends_a_logarithmic_number_of_messages(size):
    for gathered, num_messages, total in run_threads(size, gather_ranks):
        assert gathered == [[rank, -rank] for rank in range(size)]
        assert num_messages == ceil(log2(size))
        assert total == sum(range(size))


BATCH_SIZES = (1, 2, 1, 3, 2, 1, 4, 4)


def posts_per_check(comm, on_host):
    """The number of posts of each check, one for each of BATCH_SIZES."""
    comm.on_host = on_host
    posts, consistency, counts = record_sends(comm), ConsistencyCheck(comm), []
    for size in BATCH_SIZES:
        before = len(posts)
        rows = consistency.check({"batch size": size}, {"rows": comm.rank}, torch.empty(0))
        assert rows == {"rows": (0, 1)}
        counts.append(len(posts) - before)
    return counts


@pytest.fixture
def on_cpu(monkeypatch):
    """Messages stay on the CPU though `on_host` is False: there is no device here."""
    monkeypatch.setattr(Communicator, "small_message_device", lambda comm, x: x.device)


def test_on_host_every_header_is_compared(on_cpu):
    assert run_threads(2, posts_per_check, True) == [[1] * len(BATCH_SIZES)] * 2


def test_on_a_device_a_header_that_is_remembered_is_not_compared_again(monkeypatch, on_cpu):
    """A comparison waits for the device. All ranks remember the same two latest headers."""
    monkeypatch.setattr(consistency_module, "MAX_REMEMBERED", 2)
    assert run_threads(2, posts_per_check, False) == [[1, 1, 0, 1, 0, 1, 1, 0]] * 2


def check_a_wrong_and_a_right_header(comm):
    """A header that differs between the ranks, then rank 0's header on both ranks."""
    comm.on_host, consistency = False, ConsistencyCheck(comm)
    with pytest.raises(ValueError, match=r"batch size: \[1, 2\]"):
        consistency.check({"batch size": 1 + comm.rank}, {"rows": 7}, torch.empty(0))
    return consistency.check({"batch size": 1}, {"rows": 7}, torch.empty(0))


def test_a_header_that_was_refused_is_compared_again(on_cpu):
    assert run_threads(2, check_a_wrong_and_a_right_header) == [{"rows": (7, 7)}] * 2


def lengths_by_rank(comm):
    """What a check returns if rank r passes the length 10 r."""
    return ConsistencyCheck(comm).check({}, {"rows": 10 * comm.rank}, torch.empty(0))


@pytest.mark.parametrize("size", (1, 2, 3, 4, 5))
def test_lengths_are_in_the_order_of_the_ranks(size):
    """On every rank, though it receives the headers of the ranks before it first."""
    assert run_threads(size, lengths_by_rank) == [{"rows": (*range(0, 10 * size, 10),)}] * size
