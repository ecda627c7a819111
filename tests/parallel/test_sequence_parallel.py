"""SequenceParallel as a user holds it: names, shapes, gradients, placements, batches and loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from tests.sequences import MASKS, SEQLEN, gradients, run_attend, tensors
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask


@pytest.mark.parametrize("moves", ("keys", "queries"))
def test_backward_route_and_direction(moves):
    words = {
        "sequence_parallel_size": 8,
        "route": {"name": "concentric", "team_size": 2},
        "backward_route": {"name": "mesh", "rows": 4, "cols": 2},
        "backward_moves": moves,
    }
    assert run_attend(words, 4, 2, {"causal": True})[0] < 1e-10


MOVES = ("keys", "queries") * 3
PLACED = (
    {"name": "concentric", "team_size": 2, "order": [2, 0, 1], "reverse": True},
    {"name": "concentric", "team_size": 2, "order": [1, 2, 0]},
    {"name": "ring", "reverse": True},
    {"name": "double_ring", "inner": 2, "order": [1, 0]},
    {"name": "mesh", "rows": 2, "cols": 2, "order": [1, 0], "reverse": True},
    {"name": "mesh", "rows": 4, "cols": 2, "order": [1, 0]},
)


@pytest.mark.parametrize("size", (4, 8))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_placed_routes_are_exact(size, mask):
    """In forward and backward, each with another placement, keys and queries walking."""
    fits = [r for r in PLACED if "rows" not in r or r["rows"] * r["cols"] == size]
    for route, other, moves in zip(fits, fits[1:] + fits[:1], MOVES[: len(fits)], strict=True):
        words = {"sequence_parallel_size": size, "route": route, "backward_route": other}
        words |= {"backward_moves": moves, "kernel": "reference"}
        assert run_attend(words, 4, 2, MASKS[mask])[0] < 1e-10, words


def peers_of(comm, words):
    """To which ranks this rank sends in the forward."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4))
    peers, post = set(), comm._post

    def noted(label, sends, recvs):
        if label.startswith("forward"):
            peers.update(peer for peer, tensor in sends if tensor.numel())
        return post(label, sends, recvs)

    comm._post = noted
    sp.attention(q, k, v)
    return peers


def test_a_placement_sends_where_it_says():
    words = {"sequence_parallel_size": 4, "route": {"name": "ring"}}
    assert run_threads(4, peers_of, words) == [{3}, {0}, {1}, {2}]
    words["route"] = {"name": "ring", "reverse": True}
    assert run_threads(4, peers_of, words) == [{1}, {2}, {3}, {0}]


def report_of(comm, words):
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4, torch.float32, 64))
    sp.report()
    sp.attention(q, k, v)
    return sp.report(), sp.report()


def test_report_counts_bytes_since_the_last():
    ring = {"sequence_parallel_size": 4, "route": "ring"}
    unit = 2 * 16 * 4 * 8 * 4  # bytes of one rank's Q
    for first, second in run_threads(4, report_of, ring):
        assert first == {f"forward step {step}": 2 * unit for step in range(3)}
        assert second == {}
    ulysses = {"sequence_parallel_size": 4, "ulysses_degree": 4, "route": "ring"}
    for first, _ in run_threads(4, report_of, ulysses):
        assert sum(first.values()) == 3 * unit  # (P - 1)/P (2 + 2 kv)


def blocks(comm):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
    x = torch.full((1, 8, 1, 4), float(comm.rank // 2), dtype=torch.float64)
    out = sp.unshard(sp.attention(*(sp.shard(x),) * 3))
    return sp.rank, sp.size, out.mean().item()


def test_a_larger_group_is_cut_into_data_parallel_blocks():
    assert run_threads(4, blocks) == [(0, 2, 0.0), (1, 2, 0.0), (0, 2, 1.0), (1, 2, 1.0)]


def model_loss(comm, size, valid):
    """Loss and gradient of one linear layer, with valid labels only on the first tokens."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=size), comm)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2, 27), generator=random)
    labels = torch.where(torch.arange(27) < valid, ids, -100)
    weight = torch.randn(11, 11, generator=random, dtype=torch.float64).requires_grad_()
    local = sp.shard_batch({"input_ids": ids, "labels": labels})
    loss = sp.loss(weight[local["input_ids"]], local["labels"])
    loss.backward()
    right = cross_entropy(weight[ids[:, :-1]].flatten(0, 1), labels[:, 1:].flatten())
    (grad,) = torch.autograd.grad(right, weight)
    return sp.sum_over_ranks(loss), right.detach(), sp.sum_over_ranks(weight.grad), grad


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("valid", (27, 13, 2))
def test_the_loss_is_that_of_one_device_however_labels_are_spread(size, valid):
    for loss, right, grad, right_grad in run_threads(size, model_loss, size, valid):
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, right_grad, rtol=1e-12, atol=1e-14)


def batch_of(comm):
    config = SequenceParallelConfig(sequence_parallel_size=2, layout="zigzag")
    sp = SequenceParallel(config, comm)
    ids = torch.arange(1, 11)[None]
    return sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": [0, 6, 10]})


def test_shard_batch_shifts_numbers_pads_and_cuts():
    first, second = run_threads(2, batch_of)
    assert first["input_ids"].tolist() == [[1, 2, 3, 10, 0, 0]]
    assert second["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert first["labels"].tolist() == [[2, 3, 4, -100, -100, -100]]
    assert second["labels"].tolist() == [[5, 6, -100, 8, 9, 10]]
    assert first["position_ids"].tolist()[0][:4] == [0, 1, 2, 3]
    assert second["position_ids"].tolist() == [[3, 4, 5, 0, 1, 2]]
    assert first["cu_seqlens"] == second["cu_seqlens"] == (0, 6, 10, 12)


def attend_documents(comm, degree):
    """Documents of any length in the layout that follows from them, through shard_batch too."""
    words = {"layout": "document_zigzag", "ulysses_degree": degree, "route": "ring"}
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, **words), comm)
    borders = (0, 23, 26, 27, 40, SEQLEN)
    q, k, v, dout = tensors(4, 2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mine = (sp.shard(x, cu_seqlens=borders) for x in (q, k, v))
    local = sp.attention(*mine, causal=True, cu_seqlens=borders)
    out = sp.unshard(local, cu_seqlens=borders)
    right = dense_attention(q, k, v, make_mask(causal=True, cu_seqlens=borders), 8**-0.5)
    found = gradients(out, dout, q, k, v)
    wanted = gradients(right, dout, q, k, v)
    ids = torch.arange(SEQLEN)[None]
    batch = sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": borders})
    mine = sp.positions(SEQLEN, cu_seqlens=borders)
    assert torch.equal(batch["input_ids"][0], mine)
    ends = torch.isin(mine + 1, torch.tensor(borders))
    assert torch.equal(batch["labels"][0], torch.where(ends, -100, mine + 1))
    return largest((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("degree", (1, 2))
def test_documents_of_any_length_are_exact_in_their_own_layout(degree):
    assert largest(run_threads(4, attend_documents, degree)) < 1e-10


def cut_and_join(comm, layout, dim):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, layout=layout), comm)
    x = torch.arange(2 * 19 * 3, dtype=torch.float64).reshape(2, 19, 3).movedim(1, dim)
    x = x.contiguous().requires_grad_()
    local = sp.shard(x, dim=dim)
    assert torch.equal(local, x.index_select(dim, sp.positions(19)))
    whole = sp.unshard(local, dim=dim)
    (grad,) = torch.autograd.grad((whole * whole).sum(), x)
    return torch.equal(whole, x) and torch.equal(grad, 2 * x)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_unshard_undoes_shard_and_the_gradient_is_that_of_one_device(layout, dim):
    assert all(run_threads(4, cut_and_join, layout, dim))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_double_backward_is_refused(size: int, ulysses: int) -> None:
    """Where the incoming gradient needs none, the part through attention would be lost."""

    def attend(comm):
        words = {"sequence_parallel_size": size, "ulysses_degree": min(size, ulysses)}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        total = sp.attention(x, x, x).sum() + x.pow(3).sum()
        with pytest.raises(NotImplementedError, match="double backward .* sp.attention"):
            torch.autograd.grad(total, x, create_graph=True)
        logits, labels = torch.randn(4, 5, requires_grad=True), torch.arange(4)
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(sp.loss(logits, labels), logits, create_graph=True)

    run_threads(size, attend)
