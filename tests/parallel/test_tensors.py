"""Tensors of any strides, results written into, shards of uneven lengths: gradients are exact."""

from __future__ import annotations

import pytest
import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.schedule.mask import make_mask

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 32, 4, 8
ORDERS = {  # of (b, s, h, d) in memory, slowest first
    "head_dim slowest": (3, 1, 2, 0),
    "tokens fastest, as a convolution leaves them": (0, 2, 3, 1),
    "heads fastest": (0, 1, 3, 2),
    "samples fastest": (1, 2, 3, 0),
}
CONFIGS = {
    "ring": {"route": "ring"},
    "mesh": {"route": {"name": "mesh", "rows": 2, "cols": 1}},
    "queries walk": {"route": "ring", "backward_moves": "queries"},
    "ulysses": {"route": "ring", "ulysses_degree": 2},
    "chunks": {"route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2},
    "lss": {"strategy": "lss"},
}


def parallel(comm, **options):
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, **options)
    return SequenceParallel(config, comm)


def draw(dtype=torch.float64):
    """q, k, v and dout of the whole sequence."""
    random = torch.Generator().manual_seed(0)
    shape = BATCH, SEQLEN, HEADS, HEAD_DIM
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(4)]


def laid_out(x, order):
    """x with its dimensions in this order in memory, slowest first."""
    inverse = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


def worst_error(comm, options, order):
    """Of out, dq, dk and dv in float64; q, k, v and dout have this order in memory."""
    sp = parallel(comm, **options)
    q, k, v, dout = (laid_out(sp.shard(x), order) for x in draw())
    local = [x.requires_grad_() for x in (q, k, v)]
    out = sp.attention(*local, causal=True)
    actual = [out, *torch.autograd.grad(out, local, dout)]
    q, k, v, dout = draw()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*inputs, make_mask(causal=True), HEAD_DIM**-0.5)
    expected = [dense, *torch.autograd.grad(dense, inputs, dout)]
    pairs = zip(actual, map(sp.shard, expected), strict=True)
    return largest((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("options", CONFIGS.values(), ids=list(CONFIGS))
def test_attention_is_exact_for_any_order_in_memory(options, order):
    assert largest(run_threads(2, worst_error, options, order)) < 1e-10


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_expanded_gradient_gives_the_gradients_of_a_dense_one(dtype):
    """out.sum() sends back one number expanded to the shape of out."""

    def rank(comm):
        sp = parallel(comm, route="ring")
        q, k, v = (sp.shard(x).requires_grad_() for x in draw(dtype)[:3])
        out = sp.attention(q, k, v)
        actual = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all(map(torch.equal, actual, expected))

    run_threads(2, rank)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_writing_into_shards_and_gathered_tensors_gives_the_gradients_of_copies(layout):
    def rank(comm):
        sp = parallel(comm, route="ring", layout=layout)
        x = draw()[0].requires_grad_()

        def shard_and_unshard(before_writing):
            local = before_writing(sp.shard(x)).mul_(2)
            return before_writing(sp.unshard(local)).mul_(4)

        actual, expected = shard_and_unshard(lambda y: y), shard_and_unshard(torch.clone)
        assert torch.equal(actual, expected)
        grads = [torch.autograd.grad((y * y).sum(), x)[0] for y in (actual, expected)]
        assert torch.equal(*grads)

    run_threads(4, rank)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("options", CONFIGS.values(), ids=list(CONFIGS))
def test_writing_into_the_output_never_gives_wrong_gradients(options, dtype):
    """Where the backward reads the output, it raises instead."""

    def rank(comm):
        sp = parallel(comm, **options)
        q, k, v = (sp.shard(x).requires_grad_() for x in draw(dtype)[:3])
        (expected,) = torch.autograd.grad(3 * sp.attention(q, k, v).sum(), q)
        try:
            out = sp.attention(q, k, v).mul_(3)
            (actual,) = torch.autograd.grad(out.sum(), q)
        except RuntimeError as error:
            assert "inplace" in str(error)
        else:
            assert torch.equal(actual, expected)

    run_threads(2, rank)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_a_shard_is_a_copy(layout):
    """A view would keep the whole sequence in memory, and writing into it would change that."""

    def rank(comm):
        sp = parallel(comm, route="ring", layout=layout)
        sequence = torch.zeros(1, SEQLEN, 3)
        shard = sp.shard(sequence)
        shard += 1
        assert shard.untyped_storage().nbytes() == shard.nbytes
        assert not sequence.any()

    run_threads(4, rank)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_outputs_keep_no_rows_of_other_ranks_in_memory(layout):
    """A rank gathers the queries of all four: in float32 a view of its results would keep all."""

    def rank(comm):
        sp = parallel(comm, route={"name": "mesh", "rows": 4, "cols": 1}, layout=layout)
        q, k, v = (sp.shard(x).requires_grad_() for x in draw(torch.float32)[:3])
        out = sp.attention(q, k, v)
        saved = filter(torch.is_tensor, out.grad_fn.saved_tensors)
        dq, _, _ = torch.autograd.grad(out.sum(), (q, k, v))
        for x in (out, dq, *saved):
            assert x.untyped_storage().nbytes() == x.nbytes

    run_threads(4, rank)


def test_unshard_notices_a_length_that_changes_on_some_ranks_only(monkeypatch):
    """16 and 17 tokens have equally many rows on one of two ranks; no headers pass the host."""
    monkeypatch.setattr(Communicator, "small_message_device", lambda comm, x: x.device)

    def rank(comm):
        comm.on_host = False
        sp = parallel(comm, route="ring", layout="contiguous")
        for length in (16, 17, 16, 17):
            x = torch.arange(float(length))[None]
            assert torch.equal(sp.unshard(sp.shard(x)), x)

    run_threads(2, rank)


@pytest.mark.parametrize("kernel", ("reference", "sdpa"))
def test_autocast_does_not_change_the_dtype_of_attention(kernel):
    def rank(comm):
        sp = parallel(comm, route="ring", kernel=kernel)
        local = [sp.shard(x).requires_grad_() for x in draw(torch.float32)[:3]]
        expected = sp.attention(*local, causal=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = sp.attention(*local, causal=True)
            grads = torch.autograd.grad(actual.sum(), local)
        expected_grads = torch.autograd.grad(expected.sum(), local)
        assert torch.equal(actual, expected)
        assert all(map(torch.equal, grads, expected_grads))

    run_threads(2, rank)
