"""Dropout without a seed, on ranks whose random generators differ: all use rank 0's seed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers import run_processes
from tests.parallel.test_scores import tensors
from wf_backends import SequenceParallel, SequenceParallelConfig

pytestmark = pytest.mark.processes


def weights_of_two_calls(comm, seed):
    """Sums of the rows' weights in two calls without a dropout seed, gathered.

    The second call is checkpointed. Its output and gradient are compared with a call that is not
    and starts from the same state of the generator.
    """
    torch.manual_seed(seed + comm.rank)
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, route="ring")
    sp = SequenceParallel(config, comm)
    q, k, v, *_ = (sp.shard(x) for x in tensors()[:3])
    ones = torch.ones_like(v)  # so that out is the sum of a row's weights

    def weights(q, k):
        return sp.attention(q, k, ones, dropout_p=0.5)

    first = sp.unshard(weights(q, k)).detach()
    q.requires_grad_()
    state = torch.get_rng_state()
    second = checkpoint(weights, q, k, use_reentrant=False)
    (dq,) = torch.autograd.grad(second.square().sum(), q)
    torch.set_rng_state(state)
    expected = weights(q, k)
    (expected_dq,) = torch.autograd.grad(expected.square().sum(), q)
    assert torch.equal(second, expected) and torch.equal(dq, expected_dq)
    return first, sp.unshard(second).detach()


def test_ranks_without_a_seed_share_a_new_one_for_each_call_and_its_recomputation():
    """It depends on the generators: other generators give other masks."""
    results, with_other_generators = (
        run_processes(2, weights_of_two_calls, seed) for seed in (0, 100)
    )
    for of_ranks in (results, with_other_generators):
        first, second = of_ranks[0]
        assert all(torch.equal(a, first) and torch.equal(b, second) for a, b in of_ranks)
    first, second = results[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, with_other_generators[0][0])
