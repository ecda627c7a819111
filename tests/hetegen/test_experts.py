"""Experts that a layer keeps in one tensor, as transformers 5 does, are split one by one.

The layer here stands for those of transformers 5; where that is installed, tests/hetegen/models.py
has Mixtral and gpt-oss themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hetegen.models import fast_device, split_memory
from wf_backends.hetegen import dispatch_model

EXPERTS, WIDTH, HIDDEN = 4, 16, 48


def together(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers' `use_experts_implementation`: a product with all experts by default."""

    @wraps(own)
    def forward(self: Experts, x: Tensor, chosen: Tensor) -> Tensor:
        up, down = self.up.detach(), self.down.detach()
        if not self.is_transposed:
            up, down = up.mT, down.mT
        hidden = torch.bmm(x.unsqueeze(1), up[chosen]).tanh()
        return torch.bmm(hidden, down[chosen]).squeeze(1)

    return forward


class Experts(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        sizes = [(HIDDEN, WIDTH), (WIDTH, HIDDEN)]  # (rows, columns)
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, *(size[::-1] if is_transposed else size)) / 4)
            for size in sizes
        )

    @together
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x (tokens, width), chosen (tokens,): the expert of each token."""
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            at = torch.where(chosen == expert)[0]
            out[at] = self._of_one(x[at], expert)
        return out

    def _of_one(self, x: Tensor, expert: Tensor) -> Tensor:
        if self.is_transposed:
            return (x @ self.up[expert]).tanh() @ self.down[expert]
        return F.linear(F.linear(x, self.up[expert]).tanh(), self.down[expert])


class Model(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(is_transposed)
        self.last = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.last(self.experts(x, chosen))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_expert_is_split_and_only_those_chosen_are_copied(is_transposed: bool) -> None:
    model, device = Model(is_transposed), fast_device()
    x, chosen = torch.randn(6, WIDTH), torch.tensor([0, 2, 2, 0, 0, 2])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x, chosen)
        with dispatch_model(model, split_memory(model, 0.4), device, alpha=0.0) as handle:
            linears = [split.linear for split in handle.plan.splits]
            before = handle.report()["lanes"]["link"]["bytes"]
            torch.testing.assert_close(model(x, chosen), expected, rtol=0, atol=1e-6)
            copied = handle.report()["lanes"]["link"]["bytes"] - before
            assert model.state_dict().keys() == state.keys()
        assert torch.equal(model(x, chosen), expected)
    names = [f"experts.{expert}.{name}" for expert in range(EXPERTS) for name in ("up", "down")]
    assert [linear.name for linear in linears] == [*names, "last"]
    assert [linear.expert for linear in linears][::2] == [*(f"experts.{e}" for e in range(4)), ""]
    sizes = [(linear.rows, linear.columns) for linear in linears]
    assert sizes == [*[(HIDDEN, WIDTH), (WIDTH, HIDDEN)] * EXPERTS, (64, WIDTH)]
    streamed = {s.linear.name: s.streamed_decode * s.linear.row_bytes for s in handle.plan.splits}
    of_chosen = sum(streamed[name] for name in names if name.split(".")[1] in "02")
    assert 0 < of_chosen <= copied < sum(streamed.values())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert "forward" not in vars(model.experts)


def test_a_forward_of_the_layer_alone_comes_back() -> None:
    model = Model(False)
    hooked: Any = model.experts.forward
    model.experts.forward = hooked
    dispatch_model(model, split_memory(model, 0.4), fast_device()).remove()
    assert model.experts.forward is hooked


def test_what_cannot_be_right_is_refused() -> None:
    model, x, chosen = Model(False), torch.randn(2, WIDTH), torch.tensor([1, 1])
    with torch.no_grad(), dispatch_model(model, split_memory(model, 0.4), fast_device()):
        model(x, chosen)
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="no gradient"):
            model(x, chosen)
        with pytest.raises(NotImplementedError, match="one expert at a time"):
            model.experts.up[chosen.new_tensor([0, 1])]
        model.experts.up.add_(1.0)
        with pytest.raises(ValueError, match=r"experts\.1\.up\.weight was changed"):
            model(x, chosen)
