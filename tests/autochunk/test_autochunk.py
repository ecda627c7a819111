"""autochunk(model): outputs equal the model's, and a run's peak memory equals the plan's.

The reference is the unchunked model with the same weights. Peaks are measured by `StorageTracker`,
which one test compares with torch's profiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.autochunk.graph.models import NAMES, TOKENS, model_and_inputs
from tests.autochunk.helpers import (
    ANY_SLOWDOWN,
    Lambda,
    TensorConstant,
    in_float64,
    measured_peak,
    profiled_peak,
    relative_error,
)
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk import chunked as chunked_file


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_the_models_and_the_peak_equals_the_plans(name: str, attention: str) -> None:
    model, kwargs = model_and_inputs(name, attention)
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    plan = chunked.plan

    assert plan.peak_before == pytest.approx(measured_peak(model, kwargs), rel=0.05)
    assert plan.peak == pytest.approx(measured_peak(chunked, kwargs), rel=0.05)
    if attention == "eager":
        assert plan.saved > 0.5
    with torch.no_grad():
        assert relative_error(chunked(**kwargs), model(**kwargs)) < 1e-5
        model.double()
        kwargs = in_float64(kwargs)
        assert relative_error(chunked(**kwargs), model(**kwargs)) < 1e-12


def test_peak_equals_the_profilers() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        peak = profiled_peak(lambda: chunked(**kwargs))
    assert chunked.plan.peak == pytest.approx(peak, rel=0.05)


class TestBudget:
    """`max_memory` in bytes, as a size, or as a share of the model's peak."""

    @pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
    def test_peak_is_within_the_budget_and_above_half_of_it(self, share: float) -> None:
        """More slices than needed would end far below the budget."""
        model, kwargs = model_and_inputs("gpt2", "eager")
        chunked = autochunk(model, kwargs=kwargs, max_memory=share, max_slowdown=ANY_SLOWDOWN)
        limit = share * chunked.plan.peak_before
        assert measured_peak(chunked, kwargs) <= limit
        assert chunked.plan.peak > 0.5 * limit

    def test_model_that_fits_is_not_sliced(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        chunked = autochunk(model, kwargs=kwargs, max_memory="1GB")
        assert chunked.plan.regions == ()
        assert chunked.plan.peak == chunked.plan.peak_before
        assert "nothing is sliced" in chunked.explain()

    def test_graph_without_regions_keeps_a_budget_that_eager_python_exceeds(self) -> None:
        """Eager Python keeps `first` to the end of the forward, the graph frees it earlier."""

        class Chain(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                first = x * 2
                second = first + 1
                return second * 3

        x = torch.randn(256, 256)
        chunked = autochunk(Chain().eval(), (x,), max_memory=0.8, max_slowdown=ANY_SLOWDOWN)
        assert measured_peak(chunked, {"x": x}) <= 0.8 * chunked.plan.peak_before

    def test_share_refers_to_the_peak_of_the_first_inputs(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        chunked = autochunk(model, kwargs=kwargs, max_memory=0.4, max_slowdown=ANY_SLOWDOWN)
        assert chunked.plan.regions
        with torch.no_grad():
            chunked(kwargs["input_ids"][:, : TOKENS // 4])
        assert not chunked.plan.regions  # a quarter of the tokens fits unsliced


@pytest.mark.parametrize("model", [TensorConstant(), nn.Identity()])
def test_model_with_a_tensor_constant_or_without_operators(model: nn.Module) -> None:
    x = torch.randn(128, 8)
    chunked = autochunk(model.eval(), (x,), max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


def test_tensor_made_of_a_shape_is_a_known_number() -> None:
    """DeBERTa makes one of the span of its relative positions, and slices with it."""

    class Span(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            span = torch.tensor(min(len(x), 100))
            near = x[100 - span : 100 + span]
            return (near @ near.T).softmax(-1) @ near

    model, x = Span().eval(), torch.randn(256, 8)
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    assert chunked.plan.peak_before == pytest.approx(measured_peak(model, {"x": x}), rel=0.05)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


def test_chunked_model_shares_class_and_parameters_and_leaves_the_model_unchanged() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    attributes = dict(model.__dict__)
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)

    assert dict(model.__dict__) == attributes
    assert type(chunked) is type(model)
    assert chunked.config is model.config
    assert list(chunked.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(chunked.parameters(), model.parameters(), strict=True))


def test_hooks_of_the_chunked_model_run() -> None:
    model, x = TensorConstant().eval(), torch.randn(128, 8)
    chunked, calls = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN), []
    chunked.register_forward_hook(lambda *_: calls.append("hook"))
    with torch.no_grad():
        chunked(x)
    assert calls == ["hook"]


def test_hooks_of_the_model_run_once() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    model.register_forward_pre_hook(lambda _, args, kwargs: None, with_kwargs=True)
    model.register_forward_hook(
        lambda module, args, output: {"hidden": output.last_hidden_state * 2}
    )
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    with torch.no_grad():
        assert relative_error(chunked(**kwargs), model(**kwargs)) < 1e-6


def test_another_input_shape_is_planned_at_its_first_call_only() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    first_plan, ids = chunked.plan, torch.randint(0, 90, (2, TOKENS // 2))
    with torch.no_grad():
        assert relative_error(chunked(ids), model(ids)) == 0
        second_plan = chunked.plan
        assert second_plan.fingerprint != first_plan.fingerprint
        chunked(ids)
        assert chunked.plan is second_plan


def test_another_input_shape_is_planned_beside_a_plan_that_was_passed() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    budget: dict[str, Any] = {"max_memory": 0.3, "max_slowdown": ANY_SLOWDOWN}
    plan = autochunk(model, kwargs=kwargs, **budget).plan
    chunked = autochunk(model, kwargs=kwargs, plan=plan, **budget)
    ids = torch.randint(0, 90, (1, 3 * TOKENS // 4))
    with torch.no_grad():
        assert relative_error(chunked(ids), model(ids)) < 1e-6
        assert chunked.plan.peak < 0.3 * plan.peak_before < chunked.plan.peak_before
        chunked.h[0].number = 1  # a change, after which the model is captured again
        chunked(**kwargs)
    assert chunked.plan == plan


def test_as_many_plans_are_kept_as_a_server_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_file, "MAX_PLANS", 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    chunked = autochunk(model, (torch.randn(512, 8),), max_slowdown=ANY_SLOWDOWN)
    planned: list[int] = []
    with torch.no_grad():
        for rows in (500, 512, 400, 500, 400, 512):
            plan, x = chunked.plan, torch.randn(rows, 8)
            assert relative_error(chunked(x), model(x)) < 1e-6
            planned += [] if chunked.plan is plan else [rows]
    assert planned == [500, 400, 512]
    assert FakeTensorMode.cache_info().size == 0  # of shapes of inputs, for the whole process


def test_with_gradients_the_model_runs_unchunked_and_warns() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    with pytest.warns(UserWarning, match="gradients are enabled: the model runs unchunked"):
        chunked(**kwargs).last_hidden_state.sum().backward()
    assert model.wpe.weight.grad is not None


def test_plan_survives_json_and_can_be_passed_to_autochunk() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    plan = autochunk(model, kwargs=kwargs, max_memory=0.3, max_slowdown=ANY_SLOWDOWN).plan
    assert ChunkPlan.from_json(plan.to_json()) == plan
    planned = autochunk(model, kwargs=kwargs, plan=plan)
    assert planned.plan == plan
    assert measured_peak(planned, kwargs) == pytest.approx(plan.peak, rel=0.05)


@pytest.mark.parametrize("edited", ["length", "peaks"])
def test_plan_that_was_edited_runs_in_its_slices_and_has_their_peak(edited: str) -> None:
    model, x = TensorConstant().eval(), torch.randn(512, 8)
    plan = autochunk(model, (x,), max_memory=0.2, max_slowdown=1e9).plan
    (part,) = plan.regions
    if edited == "length":
        plan = replace(plan, regions=(replace(part, length=2 * part.length),))
    else:
        plan = replace(plan, peak=0, peak_before=0)
    chunked = autochunk(model, (x,), plan=plan)
    peak = measured_peak(chunked, {"x": x})
    assert chunked.plan.peak == pytest.approx(peak, rel=0.01)
    assert peak < measured_peak(model, {"x": x}) / 2


def test_peak_holds_under_torch_compile() -> None:
    """inductor neither fuses across slices nor keeps all of them."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    model, x = Attention().eval(), torch.randn(1, 1024, 16)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * chunked.plan.peak


def test_batch_norm_of_a_transposed_input_has_the_strides_of_a_real_run() -> None:
    def function(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        y = norm(x.mT).mT.contiguous().as_strided(x.shape, x.stride())
        return x + (y @ y.mT).softmax(-1) @ y

    model, x = Lambda(function, nn.BatchNorm1d(16)).eval(), torch.randn(1, 128, 16)
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        assert chunked.plan.regions and relative_error(chunked(x), model(x)) < 1e-5
