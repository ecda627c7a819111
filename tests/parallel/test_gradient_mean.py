"""`GradientMean`: gradients that are averaged in buckets, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.helpers import run_processes, run_threads
from wf_backends.comm import World
from wf_backends.parallel import gradients
from wf_backends.parallel.gradients import GradientMean


def mean_of_filled_gradients(comm):
    """Gradients after GradientMean, and bytes sent.

    Gradient i is rank + i, in three parameters of 23 float32 elements together, one of 4 bfloat16
    elements, and a frozen one. Rank 0 of several has no gradient of parameter 2, which counts as 0.
    """
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 3), (1,), (7,))]
    parameters.append(nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, comm.rank + i)
    if comm.size > 1 and comm.rank == 0:
        parameters[2].grad = None
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    GradientMean(comm)([*parameters, frozen])
    return [p.grad for p in parameters], frozen.grad, sum(comm.sent.values())


@pytest.mark.parametrize("bucket_bytes", (1, 100, 1 << 20))
@pytest.mark.parametrize("num_ranks", (1, 3, 4))
def test_gradient_mean_and_its_bytes(num_ranks, bucket_bytes, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    results = run_threads(num_ranks, mean_of_filled_gradients)
    mean_rank = (num_ranks - 1) / 2
    expected = [mean_rank + i for i in range(4)]
    if num_ranks > 1:
        expected[2] -= 2 / num_ranks
    for grads, frozen_grad, _ in results:
        for grad, value in zip(grads, expected, strict=True):
            assert torch.allclose(grad, torch.full_like(grad, value))
        assert frozen_grad is None
    assert sum(sent for *_, sent in results) == 2 * (num_ranks - 1) * (23 * 4 + 4 * 2)


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_parameters_without_a_gradient_on_any_rank_keep_none(num_ranks):
    """As on one device: with zeros AdamW would decay them."""

    def rank(comm):
        used, unused, unused_too = (nn.Parameter(torch.ones(2)) for _ in range(3))
        GradientMean(comm)([unused])
        used.grad = torch.ones(2)
        GradientMean(comm)([unused, used, unused_too])
        return [p.grad is None for p in (used, unused, unused_too)]

    assert run_threads(num_ranks, rank) == [[False, True, True]] * num_ranks


def test_a_tied_parameter_that_is_listed_twice_is_summed_once(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)

    def rank(comm):
        tied, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        tied.grad, other.grad = torch.ones(2), torch.ones(2)
        GradientMean(comm, divisor=1)([tied, other, tied])
        return tied.grad.tolist()

    assert run_threads(4, rank) == [[4.0, 4.0]] * 4


def test_parameters_that_differ_between_ranks_are_refused():
    def rank(comm):
        GradientMean(comm)([nn.Parameter(torch.zeros(2 + comm.rank))])

    with pytest.raises(ValueError, match="their shapes and dtypes"):
        run_threads(2, rank)


@pytest.mark.parametrize("value", (0, -1, 2.5, "8", True))
def test_divisors_that_are_no_positive_integers_are_refused(value):
    with pytest.raises(ValueError, match=f"divisor must be a positive integer, got {value!r}"):
        GradientMean(World(1).comm(0), divisor=value)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="give embeddings sparse=False"):
        GradientMean(World(1).comm(0))(embedding.parameters())


def shard_and_average(comm):
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(NotImplementedError, match="FSDP2 averages its gradients itself"):
        GradientMean(comm)(model.parameters())


@pytest.mark.processes
def test_parameters_that_fsdp2_has_sharded_are_refused():
    run_processes(2, shard_and_average)
