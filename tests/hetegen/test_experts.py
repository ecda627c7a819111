"""Experts that a layer keeps in one tensor, as transformers 5 does, are split one by one.

The layer here has the form of those in transformers 5. Where that is installed,
tests/hetegen/models.py has Mixtral and gpt-oss themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hetegen.models import fast_device, max_memory, streamed_bytes
from wf_backends.hetegen import dispatch_model
from wf_backends.hetegen.modules import find_weights

NUM_EXPERTS, WIDTH, HIDDEN = 4, 16, 48


def batched_experts(loop_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers' `use_experts_implementation`: by default one product with all experts."""

    @wraps(loop_forward)
    def forward(self: Experts, x: Tensor, routing: Tensor) -> Tensor:
        up, down = self.up.detach(), self.down.detach()
        if not self.is_transposed:
            up, down = up.mT, down.mT
        hidden = torch.bmm(x.unsqueeze(1), up[routing]).tanh()
        return torch.bmm(hidden, down[routing]).squeeze(1)

    return forward


class Experts(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        sizes = [(HIDDEN, WIDTH), (WIDTH, HIDDEN)]  # (output features, input features)
        self.up, self.down = (
            nn.Parameter(torch.randn(NUM_EXPERTS, *(size[::-1] if is_transposed else size)) / 4)
            for size in sizes
        )

    @batched_experts
    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """x (tokens, width), routing (tokens,): the expert of each token."""
        out = torch.zeros_like(x)
        for expert in routing.unique():
            tokens = torch.where(routing == expert)[0]
            out[tokens] = self._one_expert(x[tokens], expert)
        return out

    def _one_expert(self, x: Tensor, expert: Tensor) -> Tensor:
        if self.is_transposed:
            return (x @ self.up[expert]).tanh() @ self.down[expert]
        return F.linear(F.linear(x, self.up[expert]).tanh(), self.down[expert])


class Model(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(is_transposed)
        self.last = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        return self.last(self.experts(x, routing))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_expert_is_a_split_of_the_plan(is_transposed: bool) -> None:
    model = Model(is_transposed)
    with dispatch_model(model, max_memory(model, 0.4), fast_device()) as handle:
        linears = [split.linear for split in handle.plan.splits]
    assert [(linear.name, linear.expert, linear.rows, linear.columns) for linear in linears] == [
        ("experts.0.up", "experts.0", HIDDEN, WIDTH),
        ("experts.0.down", "experts.0", WIDTH, HIDDEN),
        ("experts.1.up", "experts.1", HIDDEN, WIDTH),
        ("experts.1.down", "experts.1", WIDTH, HIDDEN),
        ("experts.2.up", "experts.2", HIDDEN, WIDTH),
        ("experts.2.down", "experts.2", WIDTH, HIDDEN),
        ("experts.3.up", "experts.3", HIDDEN, WIDTH),
        ("experts.3.down", "experts.3", WIDTH, HIDDEN),
        ("last", "", 64, WIDTH),
    ]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_outputs_and_state_are_exact_and_only_experts_with_tokens_are_copied(
    is_transposed: bool,
) -> None:
    model, device = Model(is_transposed), fast_device()
    x, routing = torch.randn(6, WIDTH), torch.tensor([0, 2, 2, 0, 0, 2])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x, routing)
        with dispatch_model(model, max_memory(model, 0.4), device, alpha=0.0) as handle:
            torch.testing.assert_close(model(x, routing), expected, rtol=0, atol=1e-6)
            copied = handle.report()["lanes"]["link"]["bytes"]
            assert model.state_dict().keys() == state.keys()
        assert torch.equal(model(x, routing), expected)
    streamed = streamed_bytes(handle.plan)
    with_tokens = [f"experts.{expert}.{name}" for expert in (0, 2) for name in ("up", "down")]
    assert 0 < sum(streamed[name] for name in with_tokens) <= copied < sum(streamed.values())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert "forward" not in vars(model.experts)


@pytest.mark.parametrize("name", ["0", "expert_0"], ids=["Mixtral", "NLLB-MoE and Switch"])
def test_linears_of_experts_are_known_by_the_name_of_their_module(name: str) -> None:
    expert = nn.ModuleDict({"up": nn.Linear(WIDTH, 64)})
    model = nn.ModuleDict({"experts": nn.ModuleDict({name: expert}), "last": nn.Linear(64, 64)})
    assert [weight.linear.expert for weight in find_weights(model)] == [f"experts.{name}", ""]


def test_experts_for_a_token_are_those_of_the_text_in_a_model_with_images() -> None:
    model: Any = Model(False)
    model.config = SimpleNamespace(text_config=SimpleNamespace(num_experts_per_tok=1))
    with dispatch_model(model, max_memory(model, 0.4), fast_device()) as handle:
        experts = [split.linear for split in handle.plan.splits if split.linear.expert]
    assert {linear.routed for linear in experts} == {1 / NUM_EXPERTS}


def test_remove_restores_a_forward_that_was_set_on_the_layer() -> None:
    model = Model(False)
    forward: Any = model.experts.forward
    model.experts.forward = forward
    dispatch_model(model, max_memory(model, 0.4), fast_device()).remove()
    assert model.experts.forward is forward


def test_gradients_slices_of_experts_and_written_experts_are_refused() -> None:
    model, x, routing = Model(False), torch.randn(2, WIDTH), torch.tensor([1, 1])
    with torch.no_grad(), dispatch_model(model, max_memory(model, 0.4), fast_device()):
        model(x, routing)
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="no gradient"):
            model(x, routing)
        with pytest.raises(NotImplementedError, match="one expert at a time"):
            model.experts.up[routing.new_tensor([0, 1])]
        model.experts.up.add_(1.0)
        with pytest.raises(ValueError, match=r"experts\.1\.up\.weight was changed"):
            model(x, routing)
