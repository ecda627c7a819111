"""Inputs that a graph could confuse, and containers that a forward fills.

The same tensor passed twice, a parameter passed as an input, numbers that compare equal. Each
chunked model has regions, and its outputs equal the unchunked model's.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tests.autochunk.helpers import ANY_SLOWDOWN, measured_peak
from wf_backends.autochunk import ChunkPlan, autochunk

SIZE = 1, 256, 16


def attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def chunk(model: nn.Module, *args: Any, max_memory: float = 0.6, **kwargs: Any) -> nn.Module:
    """The model, planned for these inputs, with at least one region."""
    chunked = autochunk(
        model.eval(), args, kwargs, max_memory=max_memory, max_slowdown=ANY_SLOWDOWN
    )
    assert isinstance(chunked.plan, ChunkPlan) and chunked.plan.regions
    return chunked


def assert_equal_outputs(model: nn.Module, chunked: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(chunked(*args), model(*args))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention(x)


class AddsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return attention(x) + y + 2 * self.bias


def test_same_tensor_passed_twice_is_distinguished_from_two_tensors() -> None:
    model, x, y = AddsParameter(), torch.randn(SIZE), torch.randn(SIZE)
    chunked = chunk(model, x, x)
    for args in ((x, x), (x, y), (y, y)):
        assert_equal_outputs(model, chunked, *args)


def test_parameter_passed_as_an_input_is_distinguished_from_the_models_parameter() -> None:
    model, x = AddsParameter(), torch.randn(SIZE)
    chunked = chunk(model, x, model.bias)
    for y in (model.bias, nn.Parameter(torch.randn(SIZE))):
        assert_equal_outputs(model, chunked, x, y)


def test_threads_plan_one_after_another_and_leave_the_process_as_it_was() -> None:
    """A trace of torch redirects stdout and replaces functions for the whole process."""
    barrier, before = Barrier(3), (sys.stdout, torch.compiler.is_compiling)

    def plan_and_run(rows: int) -> float:
        model, x = nn.Sequential(Attention(), nn.Linear(16, 16)), torch.randn(1, rows, 16)
        barrier.wait()
        chunked = chunk(model, x)
        with torch.no_grad():
            return float((chunked(x) - model(x)).abs().max())

    with ThreadPoolExecutor(3) as pool:
        assert max(pool.map(plan_and_run, (256, 272, 288))) < 1e-5
    assert (sys.stdout, torch.compiler.is_compiling) == before


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_lengths_are_planned_once_under_torch_compile(dynamic: bool | None) -> None:
    """The compiler does not trace the planning itself, with sizes that are symbols."""
    model = nn.Sequential(Attention(), nn.Linear(16, 16))
    chunked = chunk(model, torch.randn(1, 256, 16))
    compiled = torch.compile(chunked, dynamic=dynamic, backend="eager")
    for rows in (256, 240):
        assert_equal_outputs(model, compiled, torch.randn(1, rows, 16))
    plan = chunked.plan
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equal_outputs(model, compiled, torch.randn(1, 240, 16))
    assert chunked.plan is plan


class WithAutocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            x = x + 1  # in float32 all the same
        return attention(x)


@pytest.mark.parametrize("model", [Attention(), WithAutocast()])
def test_planned_lengths_are_compiled_once_as_one_graph(model: nn.Module) -> None:
    """Also for other tensors: no guard holds their ids."""
    chunked = chunk(model, torch.randn(SIZE))
    compiled = torch.compile(chunked, fullgraph=True, backend="eager")
    compiled._compile_kwargs = {"fullgraph": True}  # as Lightning's own torch.compile does
    assert_equal_outputs(model, compiled, torch.randn(SIZE))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equal_outputs(model, compiled, torch.randn(SIZE))


def test_the_compilers_limit_is_one_of_each_model() -> None:
    """It compiles a code so many times, and then runs it as it is: models had one code."""
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for model in (Attention(), WithAutocast()):
            compiled = torch.compile(chunk(model, torch.randn(SIZE)), backend="eager")
            assert_equal_outputs(model, compiled, torch.randn(SIZE))


@torch.no_grad()
def test_expanded_input_is_read_in_slices_under_torch_compile() -> None:
    """torch refuses operators that write to one; that is how slices are kept in order."""
    model, x = Attention(), torch.randn(1, 1, 16).expand(SIZE)
    compiled = torch.compile(chunk(model, x), backend="aot_eager")
    assert_equal_outputs(model, compiled, x)


@pytest.mark.parametrize("strict", [True, False])
def test_planned_lengths_are_exported(strict: bool) -> None:
    model = nn.Sequential(Attention(), nn.Linear(16, 16))
    chunked, inputs = chunk(model, torch.randn(SIZE)), (torch.randn(SIZE),)
    plan = chunked.plan
    with torch.no_grad():
        exported = torch.export.export(chunked, inputs, strict=strict).module()
    assert_equal_outputs(model, exported, torch.randn(SIZE))
    assert chunked.plan is plan


def test_a_default_device_changes_neither_plan_nor_slices() -> None:
    """torch then asks a mode before each function, as for a subclass with products of its own."""
    model, x = nn.Sequential(Attention(), nn.Linear(16, 16)), torch.randn(SIZE)
    chunked = chunk(model, x)
    plan = chunked.plan
    with torch.device("cpu"):
        assert_equal_outputs(model, chunked, x)
        assert chunked.plan is plan
        assert chunk(model, x).plan == plan


class Multiplies(nn.Module):
    def forward(self, x: Tensor, factor: float) -> tuple[Tensor, Tensor, float]:
        return attention(x), torch.ones(1, dtype=torch.long) * factor, factor


def test_numbers_that_compare_equal_are_distinguished() -> None:
    """By the dtype of a product (1 and 1.0), and by the number that the model returns (-0.0)."""
    model, x = Multiplies(), torch.randn(SIZE)
    chunked = chunk(model, x, 1)
    for factor in (1.0, 1, True, 0.0, -0.0):
        assert_equal_outputs(model, chunked, x, factor)
        assert str(chunked(x, factor)[2]) == str(factor)


class ScalesItsTable(nn.Module):
    """Its forward takes no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(SIZE))

    def forward(self, factor: int) -> Tensor:
        return attention(self.table) * factor


def test_model_whose_forward_takes_no_tensor_runs_in_slices() -> None:
    model = ScalesItsTable()
    plan = chunk(model, 2).plan
    assert isinstance(plan, ChunkPlan)
    planned = autochunk(model, (2,), max_memory=0.6, max_slowdown=ANY_SLOWDOWN, plan=plan)
    for factor in (2, 3):  # the second is planned at its first call
        assert_equal_outputs(model, planned, factor)
        assert measured_peak(planned, {"factor": factor}) == pytest.approx(plan.peak, rel=0.05)


class CastsTo(nn.Module):
    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return attention(x).to(dtype)


def test_dtype_argument_is_part_of_the_plan() -> None:
    model, x = CastsTo(), torch.randn(SIZE)
    chunked = chunk(model, x, torch.float64, max_memory=0.8)
    for dtype in (torch.float64, torch.float16):
        assert_equal_outputs(model, chunked, x, dtype)


class WritesToObject(nn.Module):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.value = x
        return attention(x)


def test_with_an_object_that_no_graph_supports_the_model_runs_unchunked_and_warns() -> None:
    class Cache:
        value = None

    x, cache = torch.randn(SIZE), Cache()
    chunked = chunk(WritesToObject(), x)
    with torch.no_grad(), pytest.warns(UserWarning, match="an argument is a Cache, which no graph"):
        chunked(x, cache)
    assert cache.value is x


class Graph(nn.Module):
    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        return neighbours @ attention(x)[0]


def test_with_a_sparse_tensor_the_model_runs_unchunked_and_warns() -> None:
    x, neighbours = torch.randn(SIZE), torch.eye(SIZE[1])
    sparse = neighbours.to_sparse_csr()
    message = "an argument is a torch.sparse_csr tensor, which no graph takes"
    with pytest.raises(ValueError, match=message):
        chunk(Graph(), x, sparse)
    chunked = chunk(Graph(), x, neighbours)
    with torch.no_grad(), pytest.warns(UserWarning, match=message):
        assert torch.equal(chunked(x, sparse), sparse @ attention(x)[0])


class FillsListAndDict(nn.Module):
    def forward(self, x: Tensor, values: list, by_name: dict) -> Tensor:
        values.append(attention(x))
        by_name["last"] = values[-1] + 1
        return values[-1] * 2


def test_list_and_dict_are_filled() -> None:
    x, values, by_name = torch.randn(SIZE), [torch.ones(1)], {"first": torch.ones(1)}
    chunked = chunk(FillsListAndDict(), x, [torch.ones(1)], by_name)
    assert list(by_name) == ["first"]  # planning fills neither
    with torch.no_grad():
        out = chunked(x, values, by_name)
    assert len(values) == 2 and list(by_name) == ["first", "last"]
    expected = attention(x)
    torch.testing.assert_close(
        (out, values[1], by_name["last"]), (2 * expected, expected, expected + 1)
    )


class FillsDeque(nn.Module):
    def forward(self, x: Tensor, values: deque[Tensor]) -> Tensor:
        values.append(attention(x))
        return values[-1] * 2


def test_deque_is_filled() -> None:
    x, values = torch.randn(SIZE), deque([torch.ones(1)], maxlen=3)
    chunked = chunk(FillsDeque(), x, values)
    assert len(values) == 1
    with torch.no_grad():
        out = chunked(x, values)
    assert len(values) == 2
    torch.testing.assert_close(values[-1], attention(x))
    assert torch.equal(out, values[-1] * 2)


class FillsModelOutput(nn.Module):
    def forward(self, x: Tensor, output: BaseModelOutput) -> Tensor:
        output["hidden_states"] = (attention(x),)
        assert output.last_hidden_state is not None
        return output.last_hidden_state + output["hidden_states"][0]


def test_model_output_of_transformers_is_filled() -> None:
    x, output = torch.randn(SIZE), BaseModelOutput(last_hidden_state=torch.ones(1))  # type: ignore[arg-type]
    chunked = chunk(FillsModelOutput(), x, output)
    assert len(output) == 1
    with torch.no_grad():
        out = chunked(x, output)
    assert len(output) == 2 and output.hidden_states is not None
    torch.testing.assert_close(output.hidden_states[0], attention(x))
    assert torch.equal(out, output.hidden_states[0] + 1)


def with_as_tuple(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    """Adds an argument to a forward, as transformers' `can_return_tuple` adds `return_dict`."""

    @wraps(forward)
    def wrapper(self: nn.Module, *args: Any, as_tuple: bool = False, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return (out,) if as_tuple else out

    return wrapper


class Decorated(nn.Module):
    @with_as_tuple
    def forward(self, x: Tensor) -> Tensor:
        return attention(x)


def test_argument_of_the_forwards_decorator_is_accepted() -> None:
    x = torch.randn(SIZE)
    chunked = chunk(Decorated(), x=x, as_tuple=True)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x=x, as_tuple=True), (attention(x),))
        torch.testing.assert_close(chunked(x), attention(x))


def test_argument_that_neither_forward_nor_decorator_accepts_is_refused() -> None:
    with pytest.raises(ValueError, match="Decorated cannot be captured: .*unexpected keyword"):
        autochunk(Decorated().eval(), kwargs={"x": torch.randn(SIZE), "unknown": 1})
