"""Which modules may be tiled, and the reason of each that may not: decided on the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.autochunk.tiling.decoder import ROWS, WIDTH, Decoder, make_batch
from wf_backends.autochunk.graph import Effects
from wf_backends.autochunk.graph.capture import capture
from wf_backends.autochunk.tiling.tileable import TileCandidate, candidates, head_candidate

Function = Callable[[Tensor, Tensor], Tensor]


class FunctionOfWeight(nn.Module):
    """`function(x, weight)`, with a weight of its own, or one that belongs to another module."""

    def __init__(self, function: Function, other_weight: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        if other_weight is None:
            self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
        self.other_weight = [other_weight]  # a list hides it from `parameters()`

    def forward(self, x: Tensor) -> Tensor:
        weight = self.other_weight[0]
        return self.function(x, self.weight if weight is None else weight)


class Parent(nn.Module):
    def __init__(self, part: nn.Module, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.part = part
        if weight is not None:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x * 2) + 1


def candidate_of(part: nn.Module, weight: nn.Parameter | None = None) -> TileCandidate:
    """What is decided about `part` in a model, which owns `weight`."""
    model = Parent(part, weight)
    captured = capture(model, (torch.randn(2, ROWS, WIDTH),), {})
    (candidate,) = [c for c in candidates(captured, model, Effects()) if c.module == "part"]
    return candidate


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(x @ weight) @ weight.T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm((x @ weight).tanh(), (4 * WIDTH,))


@pytest.mark.parametrize("function", [mlp, norm])
def test_module_that_computes_rows_separately_may_be_tiled(function: Function) -> None:
    candidate = candidate_of(FunctionOfWeight(function))
    assert (candidate.reason, candidate.dim, candidate.rows) == ("", 1, ROWS)


def test_bytes_inside_a_module_count_its_group_norms() -> None:
    def normed_mlp(x: Tensor, weight: Tensor) -> Tensor:
        return F.group_norm(x @ weight, 1) @ weight.T

    hidden_bytes = 2 * ROWS * 4 * WIDTH * 4
    assert candidate_of(FunctionOfWeight(normed_mlp)).inner_bytes >= 2 * hidden_bytes


def mean_over_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) - (x @ weight).mean((0, 1), keepdim=True)


def shifted_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).roll(1, 1).roll(1, 0)


def positions_of_both_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) * torch.arange(x.shape[1])[:, None] * torch.arange(2)[:, None, None]


def positions_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) + torch.arange(x.shape[1])[:, None]


def triangle_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) + torch.ones(x.shape[1], 4 * WIDTH).tril()


def dropout(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x @ weight, 0.1)


def cumulative_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).cumsum(1).cumsum(0)


def normed_rows(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x @ weight, 1).roll(1, 0)


def written_input(x: Tensor, weight: Tensor) -> Tensor:
    """Of copies of its rows, tiles would write to these: a later reader of `x` would not see it."""
    return x.relu_() @ weight


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mean_over_rows, "aten.sub.Tensor needs more than its own rows"),
        (shifted_rows, "aten.roll.default has no rule along dimension 1"),
        (positions_of_both_dimensions, "aten.mul.Tensor needs more than its own rows"),
        (positions_of_rows, "aten.arange.default has no rule along dimension 0"),
        (triangle_of_rows, "aten.tril.default has no rule along dimension 0"),
        (dropout, "aten.dropout.default has no rule along dimension 1"),
        (cumulative_sum, "aten.cumsum.default has no rule along dimension 1"),
        (normed_rows, "group_normalize has no rule along dimension 1"),
        (written_input, "changes what it is given"),
    ],
)
def test_module_whose_rows_depend_on_others_is_a_wall(function: Function, reason: str) -> None:
    assert candidate_of(FunctionOfWeight(function)).reason == reason


def test_module_that_uses_a_parameter_of_another_module_is_a_wall() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
    candidate = candidate_of(FunctionOfWeight(mlp, weight), weight)
    assert candidate.reason == "uses a parameter or a constant of another module"


def head_reason(model: Decoder) -> str:
    head = head_candidate(capture(model, (), make_batch()), model)
    assert head is not None
    return head.reason


def test_head_whose_logits_are_also_read_outside_the_loss_is_a_wall() -> None:
    class Regularized(Decoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(ids, labels)
            return {"loss": out["loss"] + out["logits"].square().mean()}

    assert head_reason(Regularized()) == "the loss is not alone in reading the logits"


def test_head_of_another_loss_function_is_a_wall() -> None:
    def other_loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    model = Decoder()
    model.loss_function = other_loss
    assert head_reason(model) == "its loss is other_loss, and not transformers' ForCausalLMLoss"
