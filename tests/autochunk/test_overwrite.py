"""A region may write its output over one of its inputs: where it may, where never, what it saves.

Outputs are compared with the unchunked model's, peaks of memory with the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tests.autochunk.helpers import (
    Lambda,
    attention,
    measured_peak,
    mlp,
    relative_error,
    steps_of,
)
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.graph import Effects
from wf_backends.autochunk.lower import lower
from wf_backends.autochunk.region import rows_before
from wf_backends.autochunk.search import Candidate, candidates_at

UNLIMITED = float("inf")  # max_slowdown
MODEL_INPUT = "leaves_0"  # its node in a graph
Function = Callable[[Tensor], object]


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


def test_padded_first_slice_is_not_counted_beside_a_late_one() -> None:
    """The slice at a border has a padded copy of its rows; none is written late before it."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).eval()
    image = torch.randn(1, 4, 64, 16)
    chunked = autochunk(model, (image,), max_memory=0.7, max_slowdown=500.0)
    assert any(part.overwritten for part in chunked.plan.regions)
    assert measured_peak(chunked, {"input": image}) == chunked.plan.peak
