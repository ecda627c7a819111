"""Exchanges that all wait for: in turns where the network asks for it, and Ulysses in one mail."""

from __future__ import annotations

from collections import Counter
from threading import Event

import pytest
import torch

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.comm.exchanges import TURNS, exchange
from wf_backends.runtime.ulysses import make_head_exchange
from wf_backends.schedule.layout import lengths, make_layout
from wf_backends.schedule.mask import CAUSAL, Mask

SEQLEN = 45  # shards of 11 and 12 rows
BATCH, HEAD_DIM = 2, 8


class Network(Communicator):
    """Another communicator that wants turns, with a list of what was posted and waited for."""

    def __init__(self, inner, window):
        super().__init__()
        self.inner, self.bytes_in_flight = inner, window
        self.rank, self.size, self.on_host = inner.rank, inner.size, inner.on_host
        self.events = []

    def window(self, device):
        return self.bytes_in_flight

    def _post(self, label, sends, recvs):
        pending, peers = self.inner._post(label, sends, recvs), {peer for peer, _ in recvs}
        self.events.append(("post", label, peers))
        return Noted(pending, lambda: self.events.append(("wait", label, peers)))

    def most_on_the_way(self):
        counts = [0]
        for what, *_ in self.events:
            counts.append(counts[-1] + (1 if what == "post" else -1))
        return max(counts)


class Noted:
    def __init__(self, pending, note):
        self.pending, self.note = pending, note

    def wait(self):
        self.pending.wait()
        self.note()

    def poll(self):
        self.pending.poll()


def messages(comm, count):
    """(sends, recvs): to and from every other rank, `count` float32, what a rank sends its own."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [(peer, torch.full((count,), 1.0 + comm.rank)) for peer in others]
    return sends, [(peer, torch.empty(count)) for peer in others]


def exchanged(comm, window, count):
    """The order in which ranks came, the peers of every post, and how many were on the way."""
    network = Network(comm, window)
    sends, recvs = messages(comm, count)
    order = list(exchange(network, "all", sends, recvs))
    for peer, tensor in recvs:
        assert tensor.eq(1.0 + peer).all()
    assert network.sent["all"] == 4 * count * (comm.size - 1)
    posts = [peers for what, _, peers in network.events if what == "post"]
    return order, posts, network.most_on_the_way()


@pytest.mark.parametrize("size", (2, 5, 8))
def test_peers_take_turns_in_pairs(size):
    results = run_threads(size, exchanged, 100, 25)
    for rank, (order, posts, most) in enumerate(results):
        assert order == sorted(range(size), key=lambda peer: peer ^ rank)
        assert posts == [{peer} for peer in order[1:]]
        assert most == min(TURNS, size - 1)


def test_small_messages_do_not_wait_for_each_other():
    for _, posts, most in run_threads(8, exchanged, 500, 25):  # 100 bytes each: five are 500
        assert (len(posts), most) == (7, 5)


def test_without_a_window_all_is_posted_at_once():
    for rank, (order, posts, most) in enumerate(run_threads(5, exchanged, None, 25)):
        assert order[0] == rank and sorted(order) == list(range(5))
        assert (posts, most) == ([set(range(5)) - {rank}], 1)


def test_an_exchange_of_one_rank_posts_nothing():
    assert run_threads(1, exchanged, 100, 25) == [([0], [], 0)]
    assert run_threads(1, exchanged, None, 25) == [([0], [], 0)]


def placed_before_others_send(comm, seen):
    """Ranks 2 and 3 begin once rank 0 has what rank 1 sent."""
    if comm.rank > 1:
        assert seen.wait(20), "rank 0 does not see rank 1's messages before those of 2 and 3"
    for rank in exchange(Network(comm, 0), "all", *messages(comm, 4)):
        if (comm.rank, rank) == (0, 1):
            seen.set()
    return True


def test_what_one_peer_sent_is_there_before_another_sends():
    assert all(run_threads(4, placed_before_others_send, Event()))


def ulysses(comm, window, heads, kv_heads, causal):
    """(largest error, posts by label, bytes by label) of attention of uneven shards."""
    network = Network(comm, window)
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
    worst = max((a - b).abs().max().item() for a, b in pairs)
    found = [label for what, label, _ in network.events if what == "post" and "ulysses" in label]
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
        "forward ulysses out": element * away * queries.share,
        "backward ulysses out": element * rows[rank] * heads_of(queries),
        "backward ulysses qkv": element * away * (queries.share + 2 * keys.share),
    }


@pytest.mark.parametrize("window", (None, 0))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (8, 4), (8, 2), (4, 1)))
def test_one_exchange_in_each_direction(window, causal, heads, kv_heads):
    """Uneven shards; key heads as many as query heads, fewer, and fewer than ranks: replicated."""
    for rank, (error, posts, sent) in enumerate(
        run_threads(4, ulysses, window, heads, kv_heads, causal)
    ):
        right = derived(rank, 4, heads, kv_heads)
        assert error < 1e-10
        assert posts == dict.fromkeys(right, 1 if window is None else 3)
        assert {label: sent[label] for label in right} == right
        assert {label for label in sent if "ulysses" in label} == right.keys()
