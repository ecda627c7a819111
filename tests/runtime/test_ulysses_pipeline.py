"""Ulysses around any route: among neighbours, among ranks that are apart, and in chunks."""

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
def test_ulysses_around_any_route(degree, route_size, mask):
    """Key heads 4 and 2: as many as members, more, and fewer (copies, their gradients summed).

    Of 8 and 16 ranks each route meets all three under different masks.
    """
    for number, route in enumerate(ROUTES[route_size]):
        found = (("zigzag", 4), ("contiguous", 2), ("zigzag", 1))
        at = (number + mask) % len(found)
        for layout, kv_heads in found[at : at + 1] if degree * route_size >= 8 else found:
            words = {
                "sequence_parallel_size": degree * route_size,
                "ulysses_degree": degree,
                "route": route,
                "layout": layout,
                "kernel": "reference",
            }
            assert run_attend(words, 8, kv_heads, MASKS[mask])[0] < 1e-10, words


@pytest.mark.parametrize(("degree", "stride"), ((2, 2), (2, 4), (4, 2)))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_ulysses_among_ranks_that_are_apart(degree, stride, mask):
    """On 8 ranks, blocks of routes, and routes of consecutive ranks; all layouts by turns."""
    for number, route in enumerate(ROUTES[8 // degree]):
        words = {
            "sequence_parallel_size": 8,
            "ulysses_degree": degree,
            "ulysses_stride": stride,
            "route": route,
            "layout": ("zigzag", "contiguous")[(number + mask) % 2],
            "kernel": "reference",
        }
        assert run_attend(words, 8, (4, 2, 1)[number % 3], MASKS[mask])[0] < 1e-10, words


@pytest.mark.parametrize(
    ("degree", "stride", "chunks", "kv_heads"),
    ((2, 1, 2, 8), (2, 1, 4, 8), (2, 4, 2, 4), (4, 2, 2, 8), (8, 1, 1, 8), (1, 1, 1, 2)),
)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_heads_traded_in_chunks(degree, stride, chunks, kv_heads, mask):
    """As many key heads as query heads, and groups; what one exchange sends in all is the same."""
    for number, route in enumerate(ROUTES.get(8 // degree, ["ring"])):
        words = {
            "sequence_parallel_size": 8,
            "ulysses_degree": degree,
            "ulysses_stride": stride,
            "route": route,
            "layout": ("zigzag", "contiguous")[(number + mask) % 2],
            "kernel": "reference",
        }
        error, sent = run_attend(words | {"ulysses_chunks": chunks}, 8, kv_heads, MASKS[mask])
        assert error < 1e-10, words
        if route != "auto" and not mask:  # "auto" may take another route in chunks
            assert sent == run_attend(words, 8, kv_heads, MASKS[mask])[1]


def sent_in_chunks(comm, words, chunks):
    config = SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks})
    sp = SequenceParallel(config, comm)
    q, k, v, dout = (sp.shard(x) for x in tensors(8, 4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    comm.sent.clear()
    sp.attention(q, k, v, causal=True).backward(dout)
    return dict(comm.sent)


@pytest.mark.parametrize("keep", (False, True))
def test_chunks_send_what_all_heads_at_once_send(keep):
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "ulysses_degree": 2, "route": route}
    words |= {"keep_gathered": True} if keep else {}
    at_once, chunked = (run_threads(8, sent_in_chunks, words, chunks) for chunks in (1, 2))
    assert at_once == chunked
    assert all(sent["forward ulysses qkv"] > 0 for sent in chunked)


def without_gradients(comm, chunks):
    """In eval: what comes out, in half precision, of tensors that want no gradient."""
    words = {"sequence_parallel_size": 4, "ulysses_degree": 2, "route": "ring"}
    sp = SequenceParallel(
        SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks}), comm
    )
    q, k, v, _ = (sp.shard(x) for x in tensors(8, 4, torch.bfloat16))
    with torch.no_grad():
        return sp.unshard(sp.attention(q, k, v, causal=True))


def test_chunks_without_gradients_are_bit_for_bit_all_heads_at_once():
    for one, two in zip(*(run_threads(4, without_gradients, n) for n in (1, 2)), strict=True):
        assert torch.equal(one, two)


def recomputed(comm, chunks):
    """Gradients of a call that is run again for them, and of one that is not."""
    words = {"sequence_parallel_size": 4, "ulysses_degree": 2, "route": "ring"}
    config = SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks})
    sp = SequenceParallel(config, comm)
    *given, dout = (sp.shard(x) for x in tensors(8, 4))
    given = [x.requires_grad_() for x in given]
    outs = sp.attention(*given), checkpoint(sp.attention, *given, use_reentrant=False)
    return [torch.autograd.grad(out, given, dout) for out in outs]


@pytest.mark.parametrize("chunks", (1, 2))
def test_what_is_recomputed_has_the_same_gradients(chunks):
    for plain, again in run_threads(4, recomputed, chunks):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


def wrong_chunks(comm, kv_heads, chunks):
    words = {"sequence_parallel_size": 2, "ulysses_degree": 2, "route": "ring"}
    config = SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks})
    sp = SequenceParallel(config, comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(8, kv_heads))
    with pytest.raises(ValueError, match="ulysses_chunks must divide") as caught:
        sp.attention(q, k, v)
    return str(caught.value)


@pytest.mark.parametrize(("kv_heads", "chunks", "told"), ((8, 3, "8 heads"), (2, 2, "2 heads")))
def test_chunks_that_the_heads_do_not_allow_are_refused_on_all_ranks(kv_heads, chunks, told):
    for said in run_threads(2, wrong_chunks, kv_heads, chunks):
        assert told in said and f"got {chunks}" in said


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "says"),
    (
        (4, 6, 2, "ulysses_degree 4 must divide the 6 attention heads"),
        (3, 12, 2, "ulysses_degree 3 must divide the 2 key heads, or be a multiple"),
    ),
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(degree, heads, kv_heads, says):
    words = {"sequence_parallel_size": degree, "ulysses_degree": degree, "route": "ring"}
    with pytest.raises(ValueError, match=says):
        run_attend(words, heads, kv_heads, {})
