"""Ulysses: one exchange for q, k and v, one for out, each way, with the bytes of the heads."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.runtime.ulysses import make_head_exchange
from wf_backends.schedule.layout import lengths, make_layout
from wf_backends.schedule.mask import CAUSAL, Mask

SEQLEN = 45  # on 4 ranks shards of 11 and 12 rows
BATCH, HEAD_DIM = 2, 8


class RecordingComm(Communicator):
    """Another communicator; `posts` has the labels of what was posted."""

    def __init__(self, inner):
        super().__init__(inner.rank, inner.size)
        self.inner, self.posts, self.on_host = inner, [], inner.on_host

    def _post(self, label, sends, recvs):
        self.posts.append(label)
        return self.inner._post(label, sends, recvs)


def attend(comm, heads, kv_heads, causal):
    """(largest error of out, dq, dk, dv; posts of Ulysses by label; bytes by label)."""
    recorder = RecordingComm(comm)
    config = SequenceParallelConfig(
        sequence_parallel_size=comm.size, ulysses_degree=comm.size, route="ring"
    )
    sp = SequenceParallel(config, recorder)
    random = torch.Generator().manual_seed(0)
    shapes = [(BATCH, SEQLEN, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    shards = [sp.shard(x).detach().requires_grad_() for x in (q, k, v)]
    out = sp.attention(*shards, causal=causal)
    actual = [out, *torch.autograd.grad((out * sp.shard(dout)).sum(), shards)]
    dense = dense_attention(q, k, v, Mask(CAUSAL) if causal else Mask(), HEAD_DIM**-0.5)
    expected = [dense, *torch.autograd.grad((dense * dout).sum(), (q, k, v))]
    pairs = zip(actual, (sp.shard(x) for x in expected), strict=True)
    error = largest((a - b).abs().max().item() for a, b in pairs)
    posts = Counter(label for label in recorder.posts if "ulysses" in label)
    return error, posts, sp.report()


def derived_bytes(rank, size, heads, kv_heads):
    """Bytes that a rank sends, by label.

    Towards heads: for each other rank, its heads of this rank's rows. Towards tokens: for each
    other rank, this rank's heads of its rows.
    """
    layout = make_layout("zigzag", size, SEQLEN)
    queries, keys = (make_head_exchange(layout, count, heads) for count in (heads, kv_heads))
    rows, head = lengths(layout), BATCH * HEAD_DIM * 8  # bytes of a row of one head, in float64
    others = [peer for peer in range(size) if peer != rank]
    rows_of_others = sum(rows[peer] for peer in others)

    def heads_of_others(*exchanges):
        ranges = (exchange.heads[peer] for exchange in exchanges for peer in others)
        return sum(stop - start for start, stop in ranges)

    heads_here = queries.heads_per_member + 2 * keys.heads_per_member
    return {
        "forward ulysses qkv": head * rows[rank] * heads_of_others(queries, keys, keys),
        "forward ulysses out": head * rows_of_others * queries.heads_per_member,
        "backward ulysses out": head * rows[rank] * heads_of_others(queries),
        "backward ulysses qkv": head * rows_of_others * heads_here,
    }


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (8, 4), (8, 2), (4, 1)))
def test_one_exchange_each_way_with_the_bytes_of_the_heads(causal, heads, kv_heads):
    """Key heads: as many as query heads, fewer, and fewer than ranks, which then have copies."""
    results = run_threads(4, attend, heads, kv_heads, causal)
    for rank, (error, posts, sent) in enumerate(results):
        expected = derived_bytes(rank, 4, heads, kv_heads)
        assert error < 1e-10
        assert posts == dict.fromkeys(expected, 1)
        assert {label: size for label, size in sent.items() if "ulysses" in label} == expected
