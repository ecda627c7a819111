"""The methods of SequenceParallel on ranks as threads: attention, report, batches, loss, shards."""

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
def test_backward_on_another_route_is_exact(moves):
    config = {
        "sequence_parallel_size": 8,
        "route": {"name": "concentric", "team_size": 2},
        "backward_route": {"name": "mesh", "rows": 4, "cols": 2},
        "backward_moves": moves,
    }
    assert run_attend(config, 4, 2, {"causal": True})[0] < 1e-10


PLACED_ROUTES = (
    {"name": "concentric", "team_size": 2, "order": [2, 0, 1]},
    {"name": "concentric", "team_size": 2, "order": [1, 2, 0]},
    {"name": "ring"},
    {"name": "double_ring", "inner": 2, "order": [1, 0]},
    {"name": "mesh", "rows": 2, "cols": 2, "order": [1, 0]},
    {"name": "mesh", "rows": 4, "cols": 2, "order": [1, 0]},
)


@pytest.mark.parametrize("size", (4, 8))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_placed_routes_are_exact(size, mask):
    """Each route in a forward, and the next one in its backward; keys and queries move in turn."""
    routes = [r for r in PLACED_ROUTES if r["name"] != "mesh" or r["rows"] * r["cols"] == size]
    for i, route in enumerate(routes):
        config = {
            "sequence_parallel_size": size,
            "route": route,
            "backward_route": routes[(i + 1) % len(routes)],
            "backward_moves": ("keys", "queries")[i % 2],
            "kernel": "reference",
        }
        assert run_attend(config, 4, 2, MASKS[mask])[0] < 1e-10, config


def peers_of(comm, config, mask):
    """The ranks to which this rank sends rows in the forward."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4))
    peers, post = set(), comm._post

    def recording_post(label, sends, recvs):
        if label.startswith("forward"):
            peers.update(peer for peer, tensor in sends if tensor.numel())
        return post(label, sends, recvs)

    comm._post = recording_post
    sp.attention(q, k, v, **mask)
    return peers


def test_a_window_that_hides_nothing_goes_the_way_of_no_window():
    """The planner prices that way: no jump to the other side, between hosts, halfway through."""
    ring, window = {"sequence_parallel_size": 8, "route": "ring"}, {"window_size": (44, 44)}
    assert run_threads(8, peers_of, ring, window) == [{(rank - 1) % 8} for rank in range(8)]


def two_reports(comm, config):
    """The report after a forward of 64 tokens, and the one after that."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4, torch.float32, 64))
    sp.report()
    sp.attention(q, k, v)
    return sp.report(), sp.report()


UNIT = 2 * 16 * 4 * 8 * 4  # bytes of one rank's q: batch, rows, heads, head_dim, float32


def test_report_counts_the_bytes_since_the_last_report():
    ring = {"sequence_parallel_size": 4, "route": "ring"}
    for first, second in run_threads(4, two_reports, ring):
        assert first == {f"forward step {step}": 2 * UNIT for step in range(3)}
        assert second == {}


def test_report_counts_the_bytes_of_ulysses():
    """Three quarters of each rank's q, k, v and out."""
    ulysses = {"sequence_parallel_size": 4, "ulysses_degree": 4, "route": "ring"}
    for report, _ in run_threads(4, two_reports, ulysses):
        assert sum(report.values()) == 3 / 4 * 4 * UNIT


def rank_size_and_mean(comm):
    """(rank, size) of a group of two, and the mean output over values that differ by group."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
    x = torch.full((1, 8, 1, 4), float(comm.rank // 2), dtype=torch.float64)
    out = sp.unshard(sp.attention(*(sp.shard(x),) * 3))
    return sp.rank, sp.size, out.mean().item()


def test_a_larger_world_is_split_into_groups_that_do_not_mix():
    results = run_threads(4, rank_size_and_mean)
    assert results == [(0, 2, 0.0), (1, 2, 0.0), (0, 2, 1.0), (1, 2, 1.0)]


def loss_and_gradient(comm, size, num_labelled, embedded):
    """Loss and gradient of a linear layer, and those of cross_entropy on the whole batch.

    Only the first `num_labelled` of 27 tokens have a label. The layer runs before the batch is cut
    (`embedded`), or after.
    """
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=size), comm)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2, 27), generator=random)
    labels = torch.where(torch.arange(27) < num_labelled, ids, -100)
    weight = torch.randn(11, 11, generator=random, dtype=torch.float64).requires_grad_()
    local = sp.shard_batch({"input_ids": ids, "labels": labels, "inputs_embeds": weight[ids]})
    rows = local["inputs_embeds"] if embedded else weight[local["input_ids"]]
    loss = sp.loss(rows, local["labels"])
    loss.backward()
    expected = cross_entropy(weight[ids[:, :-1]].flatten(0, 1), labels[:, 1:].flatten())
    (expected_grad,) = torch.autograd.grad(expected, weight)
    actual = sp.sum_over_ranks(loss), sp.sum_over_ranks(weight.grad)
    return actual, (expected.detach(), expected_grad)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("num_labelled", (27, 13, 2))
@pytest.mark.parametrize("embedded", (False, True))
def test_loss_is_that_of_one_device_wherever_the_labels_are(size, num_labelled, embedded):
    results = run_threads(size, loss_and_gradient, size, num_labelled, embedded)
    for (loss, grad), (expected, expected_grad) in results:
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


def zigzag_batch(comm):
    config = SequenceParallelConfig(sequence_parallel_size=2, layout="zigzag")
    sp = SequenceParallel(config, comm)
    ids = torch.arange(1, 11)[None]
    return sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": [0, 6, 10]})


def test_shard_batch_shifts_labels_numbers_positions_pads_and_shards():
    """10 tokens are padded to 12: four chunks of 3, of which rank 0 owns the first and the last."""
    first, second = run_threads(2, zigzag_batch)
    assert first["input_ids"].tolist() == [[1, 2, 3, 10, 0, 0]]
    assert second["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert first["labels"].tolist() == [[2, 3, 4, -100, -100, -100]]
    assert second["labels"].tolist() == [[5, 6, -100, 8, 9, 10]]
    assert first["position_ids"].tolist()[0][:4] == [0, 1, 2, 3]
    assert second["position_ids"].tolist() == [[3, 4, 5, 0, 1, 2]]
    assert first["cu_seqlens"] == second["cu_seqlens"] == (0, 6, 10, 12)


BORDERS = (0, 23, 26, 27, 40, SEQLEN)


def document_zigzag(comm, degree):
    config = SequenceParallelConfig(
        sequence_parallel_size=4, layout="document_zigzag", ulysses_degree=degree, route="ring"
    )
    return SequenceParallel(config, comm)


def document_error(comm, degree):
    """The worst error of out, dq, dk and dv of a rank."""
    sp = document_zigzag(comm, degree)
    q, k, v, dout = tensors(4, 2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    shards = (sp.shard(x, cu_seqlens=BORDERS) for x in (q, k, v))
    local = sp.attention(*shards, causal=True, cu_seqlens=BORDERS)
    out = sp.unshard(local, cu_seqlens=BORDERS)
    dense = dense_attention(q, k, v, make_mask(causal=True, cu_seqlens=BORDERS), 8**-0.5)
    actual, expected = (gradients(x, dout, q, k, v) for x in (out, dense))
    return largest((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("degree", (1, 2))
def test_document_zigzag_is_exact_for_documents_of_any_length(degree):
    assert largest(run_threads(4, document_error, degree)) < 1e-10


def test_shard_batch_takes_one_token_of_any_strides():
    """torch calls a tensor of one element contiguous, whatever its strides are."""
    every_eighth = torch.arange(8.0)[None, ::8]
    batch = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "weights": every_eighth}
    sp = SequenceParallel(SequenceParallelConfig(layout="contiguous"))
    assert torch.equal(sp.shard_batch(batch)["weights"], torch.zeros(1, 1))


@pytest.mark.parametrize("degree", (1, 2))
def test_shard_batch_in_document_zigzag_has_the_rows_of_positions(degree):
    def rank(comm):
        sp = document_zigzag(comm, degree)
        ids = torch.arange(SEQLEN)[None]
        batch = sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": BORDERS})
        rows = sp.positions(SEQLEN, cu_seqlens=BORDERS)
        assert torch.equal(batch["input_ids"][0], rows)
        ends_document = torch.isin(rows + 1, torch.tensor(BORDERS))
        assert torch.equal(batch["labels"][0], torch.where(ends_document, -100, rows + 1))

    run_threads(4, rank)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_unshard_undoes_shard_with_the_gradient_of_one_device(layout, dim):
    """19 tokens: not a multiple of 4 ranks."""

    def rank(comm):
        config = SequenceParallelConfig(sequence_parallel_size=4, layout=layout)
        sp = SequenceParallel(config, comm)
        x = torch.arange(2 * 19 * 3, dtype=torch.float64).reshape(2, 19, 3).movedim(1, dim)
        x = x.contiguous().requires_grad_()
        local = sp.shard(x, dim=dim)
        assert torch.equal(local, x.index_select(dim, sp.positions(19)))
        gathered = sp.unshard(local, dim=dim)
        assert torch.equal(gathered, x)
        (grad,) = torch.autograd.grad((gathered * gathered).sum(), x)
        assert torch.equal(grad, 2 * x)

    run_threads(4, rank)


@pytest.mark.parametrize(("size", "ulysses_degree"), [(1, 1), (2, 1), (2, 2)])
def test_double_backward_through_attention_is_refused(size: int, ulysses_degree: int) -> None:
    """Its part would be lost without an error where the incoming gradient needs no gradient."""

    def rank(comm):
        config = SequenceParallelConfig(sequence_parallel_size=size, ulysses_degree=ulysses_degree)
        sp = SequenceParallel(config, comm)
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        total = sp.attention(x, x, x).sum() + x.pow(3).sum()
        with pytest.raises(NotImplementedError, match="double backward .* sp.attention"):
            torch.autograd.grad(total, x, create_graph=True)

    run_threads(size, rank)


@pytest.mark.parametrize(("size", "ulysses_degree"), [(1, 1), (2, 1), (2, 2)])
def test_a_batch_of_gradients_is_refused(size: int, ulysses_degree: int) -> None:
    def rank(comm):
        config = SequenceParallelConfig(sequence_parallel_size=size, ulysses_degree=ulysses_degree)
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        out = SequenceParallel(config, comm).attention(x, x, x)
        with pytest.raises(NotImplementedError, match=r"a backward under torch\.vmap"):
            torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)

    run_threads(size, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_double_backward_through_the_loss_is_refused(size: int) -> None:
    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=size), comm)
        logits, labels = torch.randn(4, 5, requires_grad=True), torch.arange(4)
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(sp.loss(logits, labels), logits, create_graph=True)

    run_threads(size, rank)
