"""Latents in place of keys and values (`kv_up`): beside dense attention of what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.dense import dense_attention
from tests.helpers import run_threads
from tests.parallel.test_scores import HEADS, MASKS, SEQLEN, configs
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask

OWN, SHARED, LATENTS, VALUES = 6, 4, 10, 5  # n, r, c, e


def tensors():
    """q, the shared part of the keys, latents, kv_up, dout, sinks."""
    random = torch.Generator().manual_seed(0)
    sizes = ((HEADS, OWN + SHARED), (1, SHARED), (1, LATENTS))
    shapes = [(2, SEQLEN, *size) for size in sizes] + [(HEADS, OWN + VALUES, LATENTS)]
    shapes += [(2, SEQLEN, HEADS, VALUES), (HEADS,)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes]


def attend(comm, words, mask, options):
    """out, dq, and the gradients of shared part and latents, whole; this rank's of kv_up, sinks."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, shared, c, up, dout, sinks = tensors()
    local = [sp.shard(x).requires_grad_() for x in (q, shared, c)]
    up, sinks = up.requires_grad_(), sinks.requires_grad_()
    sp.report()
    out = sp.attention(*local, kv_up=up, sinks=sinks, **mask, **options)
    *grads, dup, dsinks = torch.autograd.grad(out, [*local, up, sinks], sp.shard(dout))
    sent = sp.report()
    return [sp.unshard(x).detach() for x in (out, *grads)], dup, dsinks, sent


def check(words, mask, options):
    found = run_threads(words["sequence_parallel_size"], attend, words, mask, options)
    *inputs, dout, sinks = (x.requires_grad_() for x in tensors())
    q, shared, c, up = inputs
    both = torch.einsum("bjc,hxc->bjhx", c[:, :, 0], up)
    k = torch.cat((both[..., :OWN], shared.expand(-1, -1, HEADS, -1)), -1)
    scale = (OWN + SHARED) ** -0.5
    dense = dense_attention(q, k, both[..., OWN:], make_mask(**mask), scale, sinks, **options)
    *right, dup, dsinks = torch.autograd.grad(dense, [*inputs, sinks], dout)
    for tensors_found, *_ in found:
        for a, b in zip(tensors_found, (dense, *right), strict=True):
            assert (a - b).abs().max() < 1e-10
    for at, wanted in ((1, dup), (2, dsinks)):
        assert (torch.stack([one[at] for one in found]).sum(0) - wanted).abs().max() < 1e-10
    return [one[3] for one in found]


@settings(max_examples=40)
@given(configs().filter(lambda words: words.get("ulysses_chunks", 1) == 1), MASKS)
def test_drawn_configurations(words, mask):
    check(words, mask, {"softcap": 2.0})


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_lss(size):
    check({"sequence_parallel_size": size, "strategy": "lss"}, {"causal": True}, {})


@pytest.mark.parametrize("degree", (2, 4, 8))
def test_heads_traded_for_tokens(degree):
    words = {"sequence_parallel_size": 8, "route": "ring", "ulysses_degree": degree}
    check(words, {"causal": True}, {})


def test_the_latents_alone_travel():
    words = {"sequence_parallel_size": 4, "route": "ring", "layout": "contiguous"}
    for rank, sent in enumerate(check(words, {}, {})):
        rows = (rank + 1) * SEQLEN // 4 - rank * SEQLEN // 4
        token = 2 * (SHARED + LATENTS) * 8  # batch, float64
        assert sent["forward step 0"] == rows * token
        hops = [size for label, size in sent.items() if label.startswith("forward step")]
        assert sum(hops) == token * sum(
            (at + 1) * SEQLEN // 4 - at * SEQLEN // 4 for at in range(4) if at != (rank + 1) % 4
        )


def test_the_planner_counts_what_travels():
    """A job that leaves all to the planner runs, and is exact."""
    words = {"sequence_parallel_size": 4}
    check(words, {"causal": True}, {})


def alone(*tensors, **options):
    return SequenceParallel(SequenceParallelConfig()).attention(*tensors, **options)


def test_latents_that_do_not_fit_are_refused():
    q, shared, c, up, *_ = tensors()
    for wrong in (up[0], 3, up[:2], up[:, :OWN], up[..., :3]):
        with pytest.raises(ValueError, match="kv_up must be"):
            alone(q, shared, c, kv_up=wrong)
    with pytest.raises(ValueError, match="kv_up must have q's dtype"):
        alone(q, shared, c, kv_up=up.float())
    with pytest.raises(ValueError, match=r"beside kv_up k and v must be \(batch, length, 1"):
        alone(q, shared.expand(-1, -1, 2, -1), c.expand(-1, -1, 2, -1), kv_up=up)


def test_chunks_of_heads_are_refused_by_name():
    words = {"sequence_parallel_size": 2, "route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2}
    with pytest.raises(ValueError, match="ulysses_chunks must divide"):
        run_threads(2, attend, words, {}, {})
