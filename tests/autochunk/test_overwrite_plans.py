"""Plans whose regions write over their inputs: kept in JSON, within budgets, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.autochunk.helpers import (
    ANY_SLOWDOWN,
    Lambda,
    attention,
    measured_peak,
    mlp,
    profiled_peak,
)
from wf_backends.autochunk import ChunkedPart, ChunkPlan, autochunk

UNLIMITED = float("inf")  # max_slowdown
MODEL_INPUT = "leaves_0"  # its node in a graph


def test_every_budget_down_to_the_least_is_met_by_slices_with_a_halo() -> None:
    """A budget is searched again with a smaller share where the built plan needs more."""
    torch.manual_seed(0)
    image = torch.randn(1, 8, 64, 64)
    first, second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
    model = Lambda(lambda x, a, b: b(a(x).sigmoid()) + x, first, second).eval()
    least = autochunk(model, (image,), max_slowdown=UNLIMITED).plan
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = least.peak + int((least.peak_before - least.peak) * share)
        chunked = autochunk(model, (image,), max_memory=budget, max_slowdown=UNLIMITED)
        assert chunked.plan.peak <= budget


class TestPlan:
    """The `overwritten` of a plan's regions is kept in JSON and obeyed."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return Lambda(lambda x: mlp(mlp(x + 1))).eval()

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.randn(1, 512, 16)

    @pytest.fixture
    def plan(self, model: nn.Module, x: Tensor) -> ChunkPlan:
        plan = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN).plan
        assert isinstance(plan, ChunkPlan) and plan.regions[0].overwritten
        return plan

    def test_plan_of_json_overwrites_the_same_inputs(
        self, model: nn.Module, x: Tensor, plan: ChunkPlan
    ) -> None:
        planned = autochunk(model, (x,), plan=ChunkPlan.from_json(plan.to_json()))
        assert planned.plan == plan and measured_peak(planned, {"x": x}) == plan.peak
        assert f"over {plan.regions[0].overwritten}" in planned.explain()

    def test_without_overwriting_the_peak_is_higher(
        self, model: nn.Module, x: Tensor, plan: ChunkPlan
    ) -> None:
        regions = tuple(replace(part, overwritten="") for part in plan.regions)
        planned = autochunk(model, (x,), plan=replace(plan, regions=regions))
        assert measured_peak(planned, {"x": x}) > plan.peak

    def test_plan_that_overwrites_the_model_input_is_refused(
        self, model: nn.Module, x: Tensor, plan: ChunkPlan
    ) -> None:
        wrong = replace(plan, regions=(replace(plan.regions[0], overwritten=MODEL_INPUT),))
        with pytest.raises(ValueError, match=f"may not overwrite {MODEL_INPUT}"):
            autochunk(model, (x,), plan=wrong)


def test_input_that_needs_gradients_runs_the_model_unchunked() -> None:
    model, x = Lambda(lambda x: mlp(x + 1)).eval(), torch.randn(1, 512, 16, requires_grad=True)
    chunked = autochunk(model, (x.detach(),), max_slowdown=ANY_SLOWDOWN)
    assert any(part.overwritten for part in chunked.plan.regions)
    with pytest.warns(UserWarning, match="gradients are enabled: the model runs unchunked"):
        chunked(x).sum().backward()
    assert x.grad is not None


def assert_peak_holds_compiled(model: nn.Module, x: Tensor) -> None:
    """inductor neither fuses across slices, nor keeps all of them or what was overwritten."""
    chunked = autochunk(model.eval(), (x,), max_memory=0.6, max_slowdown=ANY_SLOWDOWN)
    assert any(part.overwritten for part in chunked.plan.regions)
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        # on CPUs with AVX2 alone oneDNN copies inputs of short convolutions, in eager slices too
        in_slices = max(chunked.plan.peak, profiled_peak(lambda: chunked(x)))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * in_slices


def test_peak_of_attention_holds_under_torch_compile() -> None:
    assert_peak_holds_compiled(Lambda(lambda x: attention(x + 1)), torch.randn(1, 1024, 16))


def test_peak_of_convolutions_holds_under_torch_compile() -> None:
    """In the format that inductor gives convolutions: else each slice would copy the weights."""

    def residual(x: Tensor, conv: nn.Module) -> Tensor:
        x = x + 1
        return x + conv(conv(x).relu())

    model = Lambda(residual, nn.Conv2d(8, 8, 3, padding=1)).to(memory_format=torch.channels_last)
    image = torch.randn(1, 8, 256, 128).to(memory_format=torch.channels_last)
    assert_peak_holds_compiled(model, image)


def test_peak_outside_of_slices_holds_under_torch_compile() -> None:
    """inductor stores sums of residuals, and does not copy queries, keys and values in one loop."""

    def layers(x: Tensor, norm: nn.Module, qkv: nn.ModuleList, mlp: nn.Module) -> Tensor:
        for _ in range(3):
            heads = (linear(norm(x)).unflatten(-1, (4, 16)).transpose(1, 2) for linear in qkv)
            x = x + scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            x = x + mlp(norm(x))
        return x

    qkv = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    hidden = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = Lambda(layers, nn.LayerNorm(64), qkv, hidden)
    assert_peak_holds_compiled(model, torch.randn(1, 1024, 64))


def test_peak_of_elementwise_operators_holds_under_torch_compile() -> None:
    """Each slice is there once."""

    def normalize(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
        x = first(x + 1)
        return last((x - x.mean()).relu())

    model = Lambda(normalize, nn.Linear(16, 64), nn.Linear(64, 4))
    assert_peak_holds_compiled(model, torch.randn(1, 1024, 16))


def test_peak_of_masked_scores_holds_under_torch_compile() -> None:
    """Softmax is computed in place: the mask, which all slices read, must not seem written."""

    def attend(x: Tensor, linear: nn.Module) -> Tensor:
        q, k, v = linear(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        rows = torch.arange(len(x[0]), device=x.device)
        mask = torch.where(rows[:, None] < rows, -1e9, 0.0)[None, None]
        return (q @ k.transpose(2, 3) * 0.1 + mask).softmax(-1) @ v

    model, x = Lambda(attend, nn.Linear(64, 192)).eval(), torch.randn(1, 512, 64)
    chunked = autochunk(model, (x,), max_memory=0.6, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * chunked.plan.peak


def test_attention_of_slices_is_fused_under_torch_compile() -> None:
    """As that of the whole model: no scores are stored."""

    def attend(x: Tensor, *linears: nn.Module) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (8, -1)).transpose(1, 2) for linear in linears)
        return (q @ k.transpose(2, 3) * 0.1).softmax(-1) @ v

    model = Lambda(attend, *(nn.Linear(64, 64) for _ in range(3))).eval()
    x = torch.randn(1, 512, 64)
    chunked = autochunk(model, (x,), max_memory=0.6, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) < 0.2 * chunked.plan.peak


def test_attention_with_numbers_is_fused_in_slices_under_torch_compile() -> None:
    """inductor knows GPT-2's attention by its scale, a tensor that nothing else may read."""

    def attend(x: Tensor, *linears: nn.Module) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (8, -1)).transpose(1, 2) for linear in linears)
        rows = torch.arange(len(x[0]), device=x.device)
        scores = q @ k.transpose(2, 3) / torch.full([], 4.0)
        scores = torch.where(rows[:, None] >= rows, scores, torch.full([], -1e38))
        return scores.softmax(-1) @ v

    model = Lambda(attend, *(nn.Linear(64, 128) for _ in range(3))).eval()
    x = torch.randn(1, 512, 64)
    chunked = autochunk(model, (x,), max_memory=0.6, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) < 0.5 * chunked.plan.peak


def test_inputs_of_a_region_are_computed_once_under_torch_compile() -> None:
    """inductor computed inputs that slices read whole again in each slice, from q, k and v."""

    def attend(x: Tensor, *linears: nn.Module) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (8, -1)).transpose(1, 2) for linear in linears)
        q = q * 0.1
        return (q @ k.transpose(2, 3)).softmax(-1) @ v

    model = Lambda(attend, *(nn.Linear(32, 512) for _ in range(3))).eval()
    x = torch.randn(2, 128, 32)
    plan = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN).plan
    assert isinstance(plan, ChunkPlan)
    rows = ChunkedPart("matmul", "matmul_1", dim=2, length=32, rows=128, operators=3, where="")
    chunked = autochunk(model, (x,), plan=replace(plan, regions=(rows,)))
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        # on CPUs with AVX2 alone oneDNN copies inputs of short convolutions, in eager slices too
        in_slices = max(chunked.plan.peak, profiled_peak(lambda: chunked(x)))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * in_slices
