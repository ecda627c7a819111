"""Ulysses' exchanges: q, k and v in one, and each with the bytes that its heads are."""

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

SEQLEN = 45  # shards of 11 and 12 rows
BATCH, HEAD_DIM = 2, 8


class Network(Communicator):
    """Another communicator, with a list of what was posted."""

    def __init__(self, inner):
        super().__init__(inner.rank, inner.size)
        self.inner, self.posts, self.on_host = inner, [], inner.on_host

    def _post(self, label, sends, recvs):
        self.posts.append(label)
        return self.inner._post(label, sends, recvs)


def ulysses(comm, heads, kv_heads, causal):
    """(largest error, posts by label, bytes by label) of attention of uneven shards."""
    network = Network(comm)
    words = {"sequence_parallel_size": comm.size, "ulysses_degree": comm.size, "route": "ring"}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), network)
    random = torch.Generator().manual_seed(0)
    shapes = [(BATCH, SEQLEN, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    shards = [sp.shard(x).detach().requires_grad_() for x in (q, k, v)]
    out = sp.attention(*shards, causal=causal)
    grads = torch.autograd.grad((out * sp.shard(dout)).sum(), shards)
    right = dense_attention(q, k, v, Mask(CAUSAL) if causal else Mask(), HEAD_DIM**-0.5)
    wanted = [right, *torch.autograd.grad((right * dout).sum(), (q, k, v))]
    pairs = zip((out, *grads), (sp.shard(x) for x in wanted), strict=True)
    worst = largest((a - b).abs().max().item() for a, b in pairs)
    found = [label for label in network.posts if "ulysses" in label]
    return worst, Counter(found), sp.report()


def derived(rank, size, heads, kv_heads):
    """Bytes that a rank sends, by label: heads of its rows, or rows of its heads, to the others."""
    layout = make_layout("zigzag", size, SEQLEN)
    queries, keys = (make_head_exchange(layout, count, heads) for count in (heads, kv_heads))
    rows, element = lengths(layout), BATCH * HEAD_DIM * 8
    others = [peer for peer in range(size) if peer != rank]

    def heads_of(*exchanges):
        return sum(stop - start for e in exchanges for start, stop in (e.heads[o] for o in others))

    away = sum(rows[peer] for peer in others)
    return {
        "forward ulysses qkv": element * rows[rank] * heads_of(queries, keys, keys),
        "forward ulysses out": element * away * queries.heads_per_member,
        "backward ulysses out": element * rows[rank] * heads_of(queries),
        "backward ulysses qkv": element
        * away
        * (queries.heads_per_member + 2 * keys.heads_per_member),
    }


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (8, 4), (8, 2), (4, 1)))
def test_one_exchange_in_each_direction(causal, heads, kv_heads):
    """Uneven shards; key heads as many as query heads, fewer, and fewer than ranks: replicated."""
    for rank, (error, posts, sent) in enumerate(run_threads(4, ulysses, heads, kv_heads, causal)):
        right = derived(rank, 4, heads, kv_heads)
        assert error < 1e-10
        assert posts == dict.fromkeys(right, 1)
        assert {label: sent[label] for label in right} == right
        assert {label for label in sent if "ulysses" in label} == right.keys()
