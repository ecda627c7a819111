"""A region may write its output over one of its inputs: where it may, where never, what it saves.

Outputs are compared with the unchunked model's, peaks of memory with the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tests.autochunk.helpers import (
    ANY_SLOWDOWN,
    Lambda,
    measured_peak,
    profiled_peak,
    relative_error,
    steps_of,
)
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.graph import Effects
from wf_backends.autochunk.lower import lower
from wf_backends.autochunk.region import rows_before
from wf_backends.autochunk.search import Candidate, candidates_at

UNLIMITED = float("inf")  # max_slowdown
MODEL_INPUT = "leaves_0"  # its node in a graph
Function = Callable[[Tensor], object]


def attention(x: Tensor) -> Tensor:
    """Residual; each row of the result needs all rows of `x`."""
    return x + ((x.tanh() @ x.tanh().mT) / 4).softmax(-1) @ x


def mlp(x: Tensor) -> Tensor:
    """Residual, 32 times as wide inside; each row of the result needs the same row only."""
    return x + (x.repeat(1, 1, 32).sigmoid().reshape(*x.shape, 32) * 0.1).sum(-1)


def convolution(x: Tensor) -> Tensor:
    """Residual; each row of the result needs the neighbouring rows, too."""
    return x + nn.functional.avg_pool1d(x.mT.tanh(), 3, stride=1, padding=1).mT


def wide_convolution(x: Tensor) -> Tensor:
    """Each row of the result needs six rows before it and six behind it."""
    return nn.functional.avg_pool1d(x.mT.tanh(), 5, stride=1, padding=2).mT + shifted(x, 6)


def shifted(x: Tensor, rows: int) -> Tensor:
    """The sum of the rows so far before and behind each row."""
    padded = nn.functional.pad(x, (0, 0, rows, rows))
    return padded[:, : -2 * rows] + padded[:, 2 * rows :]


def overwriting_candidates(function: Function) -> tuple[fx.Graph, list[Candidate]]:
    """The function's graph, and its candidates that overwrite an input."""
    steps = steps_of(Lambda(function), torch.zeros(1, 64, 16))
    candidates = [c for step in range(len(steps.steps)) for c in candidates_at(steps, step)]
    return steps.graph, [candidate for candidate in candidates if candidate.overwritten]


def test_residual_stream_is_not_stored_twice() -> None:
    """A stream of 128 KiB, and small slices of the MLP's inner value of 4 MiB."""
    model, x = Lambda(lambda x: mlp(x + 1)).eval(), torch.randn(1, 1024, 16).double()
    chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
    assert [part.overwritten for part in chunked.plan.regions] == ["add"]
    assert chunked.plan.peak == measured_peak(chunked, {"x": x}) < 1.5 * x.nbytes
    with torch.no_grad():
        assert relative_error(chunked(x), model(x)) <= 1e-12


def drawn_model(generator: torch.Generator) -> tuple[nn.Module, str]:
    """Four layers in a drawn order, and their names; a value from between them is returned, too."""
    layers = [
        (None, attention, mlp, convolution)[pick]
        for pick in torch.randint(4, (4,), generator=generator).tolist()
    ]

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 1
        kept = x
        for layer in layers:
            if layer is None:
                kept = x
                x = x + x.flip(1)
            else:
                x = layer(x)
        return x, kept

    names = ", ".join(layer.__name__ if layer else "keep" for layer in layers)
    return Lambda(forward).eval(), names


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
def test_drawn_models_have_their_outputs_and_the_predicted_peak(
    dtype: torch.dtype, tolerance: float
) -> None:
    num_overwritten = 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        model, layers = drawn_model(generator)
        x = torch.randn(1, 128, 16, generator=generator, dtype=dtype)
        x_before = x.clone()
        chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
        with torch.no_grad():
            assert relative_error(chunked(x), model(x)) <= tolerance, layers
        assert torch.equal(x, x_before), layers
        assert chunked.plan.peak == pytest.approx(measured_peak(chunked, {"x": x}), rel=0.05)
        num_overwritten += sum(bool(part.overwritten) for part in chunked.plan.regions)
    assert num_overwritten >= 3  # of all drawn models together


def of_inner_value(function: Function) -> Function:
    """The function of a value that the model computes, and not of its input."""

    @wraps(function)
    def wrapper(x: Tensor) -> object:
        return function(x + 1)

    return wrapper


def rows_behind(x: Tensor) -> object:
    return nn.functional.pad((x + 1)[:, 3:], (0, 0, 0, 3)).tanh()


def mlp_of_reversed_rows(x: Tensor) -> object:
    stream = x + 1
    return stream + mlp(stream.flip(1))


def transposed_square(x: Tensor) -> object:
    stream = x[:, :16] + 1
    return stream + (stream @ stream).sigmoid().mT


def reader_that_can_run_before_the_region(x: Tensor) -> object:
    stream = x + 1
    hidden = stream.sigmoid()
    early = hidden + stream
    return early, stream + (hidden.repeat(1, 1, 8) * 0.1)[..., 16:32]


def view_and_its_base(x: Tensor) -> object:
    stream = x + 1
    return stream + mlp(stream.view(1, 16, 64)[..., :16]).sum(1)


@pytest.mark.parametrize(
    "function",
    [
        *map(of_inner_value, (attention, mlp, convolution, wide_convolution)),
        rows_behind,
        mlp_of_reversed_rows,
        transposed_square,
        reader_that_can_run_before_the_region,
        view_and_its_base,
    ],
    ids=lambda function: function.__name__,
)
def test_every_overwriting_candidate_computes_the_models_outputs(function: Function) -> None:
    """Each candidate alone, in slices of its smallest length times 20, and of its halo."""
    x = torch.randn(1, 64, 16).double()
    expected = pytree.tree_leaves(function(x))
    graph, candidates = overwriting_candidates(function)
    assert candidates
    for candidate in candidates:
        flow, overwritten = candidate.flow, candidate.overwritten
        assert overwritten
        for length in {20 * flow.alignment, rows_before(flow, overwritten)} - {0}:
            outputs = lower(graph, [candidate.region(length)], Effects()).module(x)
            torch.testing.assert_close(list(outputs), expected, rtol=1e-12, atol=1e-12)


def test_an_input_is_not_overwritten_by_slices_that_read_most_of_it() -> None:
    """Of 64 rows each needs those 40 rows away, of the columns only its own."""
    _, candidates = overwriting_candidates(lambda x: shifted(x + 1, 40))
    assert candidates and {candidate.flow.end.dim for candidate in candidates} == {2}


def test_rows_that_the_slice_before_last_wrote_are_never_read() -> None:
    _, candidates = overwriting_candidates(of_inner_value(wide_convolution))
    candidate = max(candidates, key=lambda c: rows_before(c.flow, c.overwritten))
    assert rows_before(candidate.flow, candidate.overwritten) == 6
    with pytest.raises(ValueError, match="slices of 5 rows: they read 6 rows before their own"):
        candidate.region(5)


def test_a_convolution_is_written_over_its_input() -> None:
    """Beside the image only a few slices are live."""
    image = torch.randn(1, 8, 256, 64, dtype=torch.float64)
    conv = nn.Conv2d(8, 8, 3, padding=1).double()
    model = Lambda(lambda x, conv: conv((x + 1).sigmoid()), conv).eval()
    chunked = autochunk(model, (image,), max_slowdown=UNLIMITED)
    assert all(part.overwritten for part in chunked.plan.regions)
    assert chunked.plan.peak == measured_peak(chunked, {"x": image}) < 1.25 * image.nbytes
    with torch.no_grad():
        assert relative_error(chunked(image), model(image)) <= 1e-12


def model_input(x: Tensor) -> object:
    return mlp(x)


def view_of_the_model_input(x: Tensor) -> object:
    return mlp(x.view(1, 16, 64).view(1, 64, 16))


def value_that_is_read_later(x: Tensor) -> object:
    add = x + 1
    return mlp(add), add.sum()


def value_whose_view_is_read_later(x: Tensor) -> object:
    add = x + 1
    view = add.view(-1)
    return mlp(add), view * 2


def value_that_is_returned(x: Tensor) -> object:
    add = x + 1
    return add, mlp(add)


def value_whose_view_is_returned(x: Tensor) -> object:
    add = x + 1
    return add.view(-1), mlp(add)


def possible_view_of_the_model_input(x: Tensor) -> object:
    return mlp(x.mT.contiguous())


def value_with_a_possible_view_that_is_returned(x: Tensor) -> object:
    add = x + 1
    return add.mT.contiguous(), mlp(add), add.numel()


# function -> nodes of the value that it may not overwrite, and of the value's views
NEVER_OVERWRITTEN: dict[Function, set[str]] = {
    model_input: {MODEL_INPUT},
    view_of_the_model_input: {MODEL_INPUT, "view", "view_1"},
    value_that_is_read_later: {"add"},
    value_whose_view_is_read_later: {"add"},
    value_that_is_returned: {"add"},
    value_whose_view_is_returned: {"add", "view"},
    possible_view_of_the_model_input: {MODEL_INPUT, "m_t", "contiguous"},
    value_with_a_possible_view_that_is_returned: {"add", "m_t", "contiguous"},
}


@pytest.mark.parametrize("function", NEVER_OVERWRITTEN, ids=lambda function: function.__name__)
def test_value_is_never_overwritten(function: Function) -> None:
    graph, candidates = overwriting_candidates(function)
    names = NEVER_OVERWRITTEN[function]
    assert names <= {node.name for node in graph.nodes}
    assert names.isdisjoint(c.overwritten.name for c in candidates if c.overwritten)

    model, x = Lambda(function).eval(), torch.randn(1, 64, 16)
    x_before = x.clone()
    chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
    with torch.no_grad():
        assert relative_error(chunked(x), model(x)) < 1e-5
    assert torch.equal(x, x_before)


def test_buffer_is_never_overwritten() -> None:
    class ReadsBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(1, 256, 16))

        def forward(self, x: Tensor) -> Tensor:
            return mlp(self.table) + x

    model, x = ReadsBuffer().eval(), torch.randn(1, 256, 16)
    table_before = model.get_buffer("table").clone()
    chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
    assert chunked.plan.regions
    with torch.no_grad():
        assert relative_error(chunked(x), model(x)) < 1e-5
    assert torch.equal(model.get_buffer("table"), table_before)


def test_every_budget_down_to_the_least_is_met_by_slices_with_a_halo() -> None:
    """Slices at the border of an image are padded, which the search does not count: a budget is
    searched again with a smaller share where the built plan needs more."""
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
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * chunked.plan.peak


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


def test_peak_of_elementwise_operators_holds_under_torch_compile() -> None:
    """Each slice is there once."""

    def normalize(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
        x = first(x + 1)
        return last((x - x.mean()).relu())

    model = Lambda(normalize, nn.Linear(16, 64), nn.Linear(64, 4))
    assert_peak_holds_compiled(model, torch.randn(1, 1024, 16))
