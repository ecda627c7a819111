"""Small tensors of every rank on every rank, in few messages."""

from __future__ import annotations

from math import ceil, log2

import pytest
import torch

from tests.helpers import run_threads
from wf_backends.agree import gather_small, sum_over_ranks


def exchanged(comm):
    """What a rank finds, and how many messages it sent for it."""
    sent, post = [], comm.post_control

    def counting(label, sends, recvs):
        sent.extend(sends)
        return post(label, sends, recvs)

    comm.post_control = counting
    everyone = gather_small(comm, torch.tensor([comm.rank, -comm.rank]))
    return everyone.tolist(), len(sent), sum_over_ranks(comm, torch.tensor(float(comm.rank)))


@pytest.mark.parametrize("size", range(1, 18))
def test_every_rank_finds_all_in_order_with_a_message_for_every_doubling(size):
    for everyone, messages, total in run_threads(size, exchanged):
        assert everyone == [[rank, -rank] for rank in range(size)]
        assert messages == ceil(log2(size))
        assert total == sum(range(size))
