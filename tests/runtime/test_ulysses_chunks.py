"""Ulysses around any route, among neighbours and ranks apart, and in chunks: exact, equal bytes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers import run_threads
from tests.sequences import MASKS, run_attend, tensors
from wf_backends import SequenceParallel, SequenceParallelConfig

ROUTES = {
    1: ["ring"],
    2: ["ring", "all_gather", {"name": "mesh", "rows": 2, "cols": 1}],
    4: ["auto", {"name": "concentric", "team_size": 2}, {"name": "double_ring", "inner": 2}],
}


@pytest.mark.parametrize("degree", (1, 2, 4))
@pytest.mark.parametrize("route_size", ROUTES)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_ulysses_around_any_route_is_exact(degree, route_size, mask):
    """With more key heads than members, as many, and fewer (copies, whose gradients are summed).

    On 8 and 16 ranks a route takes one of the three, under each mask another.
    """
    layouts_and_kv_heads = [("zigzag", 4), ("contiguous", 2), ("zigzag", 1)]
    for i, route in enumerate(ROUTES[route_size]):
        pairs = layouts_and_kv_heads
        if degree * route_size >= 8:
            pairs = [layouts_and_kv_heads[(i + mask) % 3]]
        for layout, kv_heads in pairs:
            config = {
                "sequence_parallel_size": degree * route_size,
                "ulysses_degree": degree,
                "route": route,
                "layout": layout,
                "kernel": "reference",
            }
            assert run_attend(config, 8, kv_heads, MASKS[mask])[0] < 1e-10, config


def on_8_ranks(degree, stride, route, layout_index):
    return {
        "sequence_parallel_size": 8,
        "ulysses_degree": degree,
        "ulysses_stride": stride,
        "route": route,
        "layout": ("zigzag", "contiguous")[layout_index % 2],
        "kernel": "reference",
    }


@pytest.mark.parametrize(("degree", "stride"), ((2, 2), (2, 4), (4, 2)))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_ulysses_among_ranks_apart_is_exact(degree, stride, mask):
    """Layouts alternate, key heads take turns."""
    for i, route in enumerate(ROUTES[8 // degree]):
        config = on_8_ranks(degree, stride, route, i + mask)
        assert run_attend(config, 8, (4, 2, 1)[i % 3], MASKS[mask])[0] < 1e-10, config


@pytest.mark.parametrize(
    ("degree", "stride", "chunks", "kv_heads"),
    ((2, 1, 2, 8), (2, 1, 4, 8), (2, 4, 2, 4), (4, 2, 2, 8), (8, 1, 1, 8), (1, 1, 1, 2)),
)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_trading_heads_in_chunks_is_exact(degree, stride, chunks, kv_heads, mask):
    """With the kinds of messages of one exchange; route "auto" may be another one in chunks."""
    for i, route in enumerate(ROUTES.get(8 // degree, ["ring"])):
        config = on_8_ranks(degree, stride, route, i + mask)
        in_chunks = config | {"ulysses_chunks": chunks}
        error, message_kinds = run_attend(in_chunks, 8, kv_heads, MASKS[mask])
        assert error < 1e-10, in_chunks
        if route != "auto" and mask == 0:
            assert message_kinds == run_attend(config, 8, kv_heads, MASKS[mask])[1]


def with_chunks(comm, config, chunks):
    config = SequenceParallelConfig.from_dict(config | {"ulysses_chunks": chunks})
    return SequenceParallel(config, comm)


def bytes_sent(comm, config, chunks):
    """By label, in a forward and a backward."""
    sp = with_chunks(comm, config, chunks)
    q, k, v, dout = (sp.shard(x) for x in tensors(8, 4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    comm.sent.clear()
    sp.attention(q, k, v, causal=True).backward(dout)
    return dict(comm.sent)


@pytest.mark.parametrize("keep", (False, True))
def test_two_chunks_send_the_bytes_of_one(keep):
    route = {"name": "concentric", "team_size": 2}
    config = {"sequence_parallel_size": 8, "ulysses_degree": 2, "route": route}
    config |= {"keep_gathered": True} if keep else {}
    one_chunk, two_chunks = (run_threads(8, bytes_sent, config, chunks) for chunks in (1, 2))
    assert one_chunk == two_chunks
    assert all(sent["forward ulysses qkv"] > 0 for sent in two_chunks)


RING = {"sequence_parallel_size": 4, "ulysses_degree": 2, "route": "ring"}


def output_without_gradients(comm, chunks):
    """In bfloat16, gathered, under torch.no_grad()."""
    sp = with_chunks(comm, RING, chunks)
    q, k, v, _ = (sp.shard(x) for x in tensors(8, 4, torch.bfloat16))
    with torch.no_grad():
        return sp.unshard(sp.attention(q, k, v, causal=True))


def test_two_chunks_without_gradients_are_bit_for_bit_one():
    one_chunk, two_chunks = (run_threads(4, output_without_gradients, n) for n in (1, 2))
    assert all(map(torch.equal, one_chunk, two_chunks))


def plain_and_checkpointed_gradients(comm, chunks):
    sp = with_chunks(comm, RING, chunks)
    q, k, v, dout = (sp.shard(x) for x in tensors(8, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outs = sp.attention(*inputs), checkpoint(sp.attention, *inputs, use_reentrant=False)
    return [torch.autograd.grad(out, inputs, dout) for out in outs]


@pytest.mark.parametrize("chunks", (1, 2))
def test_a_checkpointed_call_has_the_gradients_of_a_plain_one(chunks):
    for plain, checkpointed in run_threads(4, plain_and_checkpointed_gradients, chunks):
        torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("kv_heads", "chunks", "heads"), ((8, 3, "8 heads"), (2, 2, "2 heads")))
def test_chunks_that_do_not_divide_the_heads_are_refused_on_all_ranks(kv_heads, chunks, heads):
    def rank(comm):
        sp = with_chunks(comm, RING | {"sequence_parallel_size": 2}, chunks)
        q, k, v, _ = (sp.shard(x) for x in tensors(8, kv_heads))
        with pytest.raises(ValueError, match="ulysses_chunks must divide") as refusal:
            sp.attention(q, k, v)
        return str(refusal.value)

    for error in run_threads(2, rank):
        assert heads in error and f"got {chunks}" in error


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "message"),
    (
        (4, 6, 2, "ulysses_degree 4 must divide the 6 attention heads"),
        (3, 12, 2, "ulysses_degree 3 must divide the 2 key heads, or be a multiple"),
    ),
)
def test_a_degree_that_does_not_divide_the_heads_is_refused(degree, heads, kv_heads, message):
    config = {"sequence_parallel_size": degree, "ulysses_degree": degree, "route": "ring"}
    with pytest.raises(ValueError, match=message):
        run_attend(config, heads, kv_heads, {})
