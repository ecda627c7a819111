"""The exchange of channels for tokens, where packed documents change from call to call."""

from __future__ import annotations

import pytest

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.parallel import ChannelExchange

SEQLEN = 16


def gathered(comm, *calls):
    """Whether every rank gets all positions, in order, at each call with these documents."""
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="document_zigzag")
    sp = SequenceParallel(config, comm)
    exchange = ChannelExchange(sp)
    whole = []
    for borders in calls:
        rows = sp.positions(SEQLEN, cu_seqlens=borders).double()
        x = rows[None, :, None, None].repeat(1, 1, comm.size, 1)
        whole.append(exchange.gather(x, borders).flatten().tolist())
    return whole == [[*range(SEQLEN)]] * len(calls)


def test_documents_that_change_the_rows_of_some_ranks_only_are_noticed(monkeypatch):
    """The last of three ranks has 5 rows of both batches; no headers pass the host."""
    monkeypatch.setattr(Communicator, "small_message_device", lambda comm, x: x.device)

    def rank(comm):
        comm.on_host = False
        return gathered(comm, (0, 1, SEQLEN), (0, 3, SEQLEN), (0, 1, SEQLEN))

    assert run_threads(3, rank, timeout=20) == [True] * 3


def test_documents_that_differ_between_ranks_are_refused():
    def rank(comm):
        return gathered(comm, (0, 1 + comm.rank, SEQLEN))

    with pytest.raises(ValueError, match="the ranks do not agree.*cu_seqlens"):
        run_threads(2, rank, timeout=20)
