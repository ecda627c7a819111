"""A seed that nobody gave, on ranks whose generators are their own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers import run_processes
from tests.parallel.test_scores import tensors
from wf_backends import SequenceParallel, SequenceParallelConfig

pytestmark = pytest.mark.processes


def seeds_of(comm, seed):
    """Two calls without a seed, the second run again by activation checkpointing."""
    torch.manual_seed(seed + comm.rank)
    words = {"sequence_parallel_size": comm.size, "route": "ring"}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, k, v, *_ = (sp.shard(x) for x in tensors()[:3])
    ones = torch.ones_like(v)  # out is the sum of a row's weights

    def weights(q, k):
        return sp.attention(q, k, ones, dropout_p=0.5)

    first = sp.unshard(weights(q, k)).detach()
    q.requires_grad_()
    state = torch.get_rng_state()
    again = checkpoint(weights, q, k, use_reentrant=False)
    (dq,) = torch.autograd.grad(again.square().sum(), q)
    torch.set_rng_state(state)
    plain = weights(q, k)
    (right,) = torch.autograd.grad(plain.square().sum(), q)
    assert torch.equal(again, plain) and torch.equal(dq, right)
    return first, sp.unshard(again).detach()


def test_without_a_seed_the_ranks_share_one_a_call_and_checkpointing_draws_it_again():
    """That of the first rank's generator: the other ranks' generators are seeded otherwise."""
    both = [run_processes(2, seeds_of, seed) for seed in (0, 100)]
    first, second = both[0][0]
    assert all(torch.equal(a, first) and torch.equal(b, second) for a, b in both[0])
    assert not torch.equal(first, second) and not torch.equal(first, both[1][0][0])
