"""Transforms of torch, export and tracing are refused."""

from __future__ import annotations

import re

import pytest
import torch

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import World


def one_rank() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig(), World(1).comm(0))


def dual(attend, q):
    with torch.autograd.forward_ad.dual_level():
        return attend(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize(
    "transform",
    (
        lambda attend, q: torch.vmap(attend)(q[None]),
        lambda attend, q: torch.func.grad(lambda q: attend(q).sum())(q),
        lambda attend, q: torch.func.jvp(attend, (q,), (q,)),
        lambda attend, q: torch.func.jacrev(attend)(q),
        dual,
    ),
    ids=("vmap", "grad", "jvp", "jacrev", "dual"),
)
def test_transforms_of_torch_are_refused_with_an_alternative(transform):
    sp, q = one_rank(), torch.randn(1, 8, 2, 8)
    message = r"sp.attention under torch.vmap.*q is inside.*batch dimension.*torch.autograd.grad"
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda q: sp.attention(q, q, q), q)


class AttentionModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sp = one_rank()

    def forward(self, q):
        return self.sp.attention(q, q, q)


@pytest.mark.parametrize("strict", (False, True))
def test_export_is_refused_with_an_alternative(strict):
    message = r"torch.export or .* of a model that calls sp.attention.*torch's own attention"
    with pytest.raises(Exception) as refusal:
        torch.export.export(AttentionModule(), (torch.randn(1, 8, 2, 8),), strict=strict)
    errors = (refusal.value, refusal.value.__cause__, refusal.value.__context__)
    assert any(re.search(message, str(error)) for error in errors), errors


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_torch_jit_trace_is_refused_before_a_message_is_sent():
    """On several ranks torch would end at the first message: "Tried to trace ... ProcessGroup"."""
    with pytest.raises(NotImplementedError, match="torch.jit.trace of .* sp.attention is not"):
        torch.jit.trace(AttentionModule(), (torch.randn(1, 8, 2, 8),))
