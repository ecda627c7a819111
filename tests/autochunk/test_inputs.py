"""Inputs that a graph could mistake for others: one tensor given twice, a weight, numbers that
compare equal; and containers that a forward fills."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from wf_backends.autochunk import autochunk

ANY = 4.0  # slowdown: these models are small, and memory is the matter here
SIZE = 1, 256, 16


def attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def assert_the_same(model: nn.Module, chunked: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(chunked(*args), model(*args))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return attention(x) + y + 2 * self.start


def test_one_tensor_given_twice_is_another_form_than_two() -> None:
    model, x, y = Added().eval(), torch.randn(SIZE), torch.randn(SIZE)
    chunked = autochunk(model, (x, x), max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions
    for args in ((x, x), (x, y), (y, y)):
        assert_the_same(model, chunked, *args)


def test_a_weight_that_is_given_as_an_input_is_an_input() -> None:
    model, x = Added().eval(), torch.randn(SIZE)
    chunked = autochunk(model, (x, model.start), max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions
    for y in (model.start, nn.Parameter(torch.randn(SIZE))):
        assert_the_same(model, chunked, x, y)


class Multiplied(nn.Module):
    def forward(self, x: Tensor, factor: float) -> tuple[Tensor, Tensor, float]:
        return attention(x), torch.ones(1, dtype=torch.long) * factor, factor


def test_values_that_compare_equal_are_told_apart() -> None:
    model, x = Multiplied().eval(), torch.randn(SIZE)
    chunked = autochunk(model, (x, 1), max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions
    for factor in (1.0, 1, True, 0.0, -0.0):
        assert_the_same(model, chunked, x, factor)
        assert str(chunked(x, factor)[2]) == str(factor)


class Filling(nn.Module):
    def forward(self, x: Tensor, kept: Any) -> Tensor:
        if isinstance(kept, deque):
            kept.append(attention(x))
            return kept[-1] * 2
        kept["hidden_states"] = (attention(x),)
        return kept.last_hidden_state + kept["hidden_states"][0]


@pytest.mark.parametrize(
    "kept",
    [deque([torch.ones(1)], maxlen=3), BaseModelOutput(last_hidden_state=torch.ones(1))],  # type: ignore[arg-type]
    ids=["deque", "output"],
)
def test_containers_that_know_no_update_are_filled(kept: Any) -> None:
    model, x = Filling().eval(), torch.randn(SIZE)
    chunked = autochunk(model, (x, kept), max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions and len(kept) == 1
    with torch.no_grad():
        found = chunked(x, kept)
    assert len(kept) == 2
    if isinstance(kept, deque):
        torch.testing.assert_close(found, 2 * attention(x))
        assert torch.equal(kept[-1] * 2, found)
    else:
        torch.testing.assert_close(found, 1 + attention(x))
        assert kept.hidden_states is not None and torch.equal(kept.hidden_states[0] + 1, found)


class Cast(nn.Module):
    def forward(self, x: Tensor, kind: torch.dtype, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.seen = x
        return attention(x).to(kind)


def test_constants_are_values_and_objects_that_no_graph_takes_are_the_models() -> None:
    class Cache:
        seen = None

    model, x, cache = Cast().eval(), torch.randn(SIZE), Cache()
    chunked = autochunk(model, (x, torch.float64), max_memory=0.8, max_slowdown=ANY)
    assert chunked.plan.regions
    for kind in (torch.float64, torch.float16):
        assert_the_same(model, chunked, x, kind)
    with torch.no_grad(), pytest.warns(UserWarning, match="an argument is a Cache, which no graph"):
        chunked(x, torch.float64, cache)
    assert cache.seen is x


def takes_more(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    """As transformers' `can_return_tuple` does with `return_dict`."""

    @wraps(forward)
    def wrapper(self: nn.Module, *args: Any, as_tuple: bool = False, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return (out,) if as_tuple else out

    return wrapper


class Decorated(nn.Module):
    @takes_more
    def forward(self, x: Tensor) -> Tensor:
        return attention(x)


def test_an_argument_that_a_decorator_of_the_forward_takes() -> None:
    model, x = Decorated().eval(), torch.randn(SIZE)
    chunked = autochunk(model, kwargs={"x": x, "as_tuple": True}, max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions
    with torch.no_grad():
        torch.testing.assert_close(chunked(x=x, as_tuple=True), (attention(x),))
        torch.testing.assert_close(chunked(x), attention(x))
    with pytest.raises(ValueError, match="Decorated cannot be captured: .*unexpected keyword"):
        autochunk(model, kwargs={"x": x, "unknown": 1})
