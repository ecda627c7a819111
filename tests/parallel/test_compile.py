"""torch.compile around a model: the attention stays outside, and gradients stay exact."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends._compile import eager
from wf_backends.comm import World


class AttentionLayer(nn.Module):
    def __init__(self, sp):
        super().__init__()
        self.sp, self.proj = sp, nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x):
        q, k, v = self.proj(x).unsqueeze(2).chunk(3, dim=-1)
        return self.sp.attention(q, k, v, causal=True).squeeze(2) * 2


def test_compiled_model_has_the_gradients_of_the_eager_one():
    sp = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    layer, x = AttentionLayer(sp), torch.randn(1, 6, 8, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.proj.weight)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter)
    for _ in range(3):
        actual = torch.autograd.grad(compiled(x).square().sum(), layer.proj.weight)
        assert actual[0].abs().max() > 0
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert counter.frame_count == 2, "one graph before the attention, one after it"


def test_model_with_several_eager_functions_is_never_recompiled():
    """All functions share the code of one wrapper, which must not be compiled for each of them."""
    double, square, negate = map(eager, (lambda x: 2 * x, lambda x: x * x, lambda x, y: y - x))

    def model(x):
        return negate(square(double(x) + 1), x) + 1

    x = torch.randn(3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_a_compiled_step_does_not_trace_the_backward():
    """torch traces Python that a backward calls in a compiled step, and fails at its messages."""

    def step(layer, x):
        layer(x).square().sum().backward()
        return layer.proj.weight.grad

    sp = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    layer, x = AttentionLayer(sp), torch.randn(1, 6, 8, dtype=torch.float64)
    expected = step(layer, x).clone()
    layer.zero_grad()
    counter = CompileCounterWithBackend("eager")
    torch.testing.assert_close(torch.compile(step, backend=counter)(layer, x), expected)
    assert counter.frame_count == 3, "before the attention, after it, and after the backward"
