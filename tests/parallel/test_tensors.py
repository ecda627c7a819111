"""Tensors as users hand them in and use them afterwards: any strides, written into, uneven."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.schedule.mask import make_mask

SEQLEN, HEADS, HEAD_DIM = 32, 4, 8
ORDERS = {  # of (b, s, h, d) in memory, slowest first
    "head_dim slowest": (3, 1, 2, 0),
    "tokens fastest, as a convolution leaves them": (0, 2, 3, 1),
    "heads fastest": (0, 1, 3, 2),
}
PLANS = {
    "ring": {"route": "ring"},
    "mesh": {"route": {"name": "mesh", "rows": 2, "cols": 1}},
    "queries walk": {"route": "ring", "backward_moves": "queries"},
    "ulysses": {"route": "ring", "ulysses_degree": 2},
    "chunks": {"route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2},
    "lss": {"strategy": "lss"},
}


def parallel(comm, **words):
    return SequenceParallel(SequenceParallelConfig(sequence_parallel_size=comm.size, **words), comm)


def draw(dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shape = 1, SEQLEN, HEADS, HEAD_DIM
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(4)]


def laid_out(x, order):
    """x with its dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def worst_error(comm, words, order):
    """Of out, dq, dk, dv in float64, all tensors laid out so."""
    sp = parallel(comm, **words)
    q, k, v, dout = (laid_out(sp.shard(x), order) for x in draw())
    local = [x.requires_grad_() for x in (q, k, v)]
    out = sp.attention(*local, causal=True)
    found = [out, *torch.autograd.grad(out, local, dout)]
    whole = [x.requires_grad_() for x in draw()[:3]]
    right = dense_attention(*whole, make_mask(causal=True), HEAD_DIM**-0.5)
    wanted = [right, *torch.autograd.grad(right, whole, draw()[3])]
    pairs = zip(found, map(sp.shard, wanted), strict=True)
    return largest((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("words", PLANS.values(), ids=list(PLANS))
def test_any_order_in_memory(words, order):
    assert largest(run_threads(2, worst_error, words, order)) < 1e-10


def sum_of_out(comm, dtype):
    """Gradients of out.sum(), whose own gradient is one number expanded; and of ones."""
    sp = parallel(comm, route="ring")
    q, k, v = (sp.shard(x).requires_grad_() for x in draw(dtype)[:3])
    out = sp.attention(q, k, v)
    expanded = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    plain = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return all(map(torch.equal, expanded, plain))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_an_expanded_gradient(dtype):
    assert all(run_threads(2, sum_of_out, dtype))


def write_into(comm, layout):
    """Gradients through shards and wholes that are written into, and through copies of them."""
    sp = parallel(comm, route="ring", layout=layout)
    x = draw()[0].requires_grad_()

    def forward(result):
        return result(sp.unshard(result(sp.shard(x)).mul_(2))).mul_(4)

    found, wanted = forward(lambda y: y), forward(torch.clone)
    grads = [torch.autograd.grad((y * y).sum(), x)[0] for y in (found, wanted)]
    return torch.equal(found, wanted) and torch.equal(*grads)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_shards_and_wholes_may_be_written_into(layout):
    assert all(run_threads(4, write_into, layout))


def write_into_output(comm, words, dtype):
    """The backward needs the output: writing into it must be refused, not give wrong gradients."""
    sp = parallel(comm, **words)
    q, k, v = (sp.shard(x).requires_grad_() for x in draw(dtype)[:3])
    wanted = torch.autograd.grad(3 * sp.attention(q, k, v).sum(), q)[0]
    try:
        out = sp.attention(q, k, v).mul_(3)
        return torch.equal(torch.autograd.grad(out.sum(), q)[0], wanted)
    except RuntimeError as error:
        return "inplace" in str(error)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("words", PLANS.values(), ids=list(PLANS))
def test_writing_into_the_output_never_gives_wrong_gradients(words, dtype):
    assert all(run_threads(2, write_into_output, words, dtype))


def shares_memory(comm, layout):
    sp = parallel(comm, route="ring", layout=layout)
    whole = torch.zeros(1, SEQLEN, 3)
    shard = sp.shard(whole)
    shard += 1
    return shard.untyped_storage().nbytes() != shard.nbytes or bool(whole.any())


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_a_shard_is_a_tensor_of_its_own(layout):
    """A view would keep the whole sequence in memory, and writing into it would change that."""
    assert not any(run_threads(4, shares_memory, layout))


def join_several(comm, lengths):
    """Shards of sequences of these lengths, joined without passing headers through the host."""
    comm.on_host = False
    sp = parallel(comm, route="ring", layout="contiguous")
    wholes = [torch.arange(float(length))[None] for length in lengths]
    return all(torch.equal(sp.unshard(sp.shard(x)), x) for x in wholes)


def test_shards_whose_lengths_change_on_some_ranks_only(monkeypatch):
    """16 and 17 tokens have the same rows on one of the ranks."""
    monkeypatch.setattr(Communicator, "small_message_device", lambda comm, x: x.device)
    assert all(run_threads(2, join_several, (16, 17, 16, 17)))


def under_autocast(comm, kernel):
    sp = parallel(comm, route="ring", kernel=kernel)
    attend = partial(sp.attention, causal=True)
    local = [sp.shard(x).requires_grad_() for x in draw(torch.float32)[:3]]
    plain = attend(*local)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*local)
        grads = torch.autograd.grad(out.sum(), local)
    wanted = [plain, *torch.autograd.grad(plain.sum(), local)]
    return all(map(torch.equal, [out, *grads], wanted))


@pytest.mark.parametrize("kernel", ("reference", "sdpa"))
def test_autocast_changes_nothing_inside(kernel):
    assert all(run_threads(2, under_autocast, kernel))
