"""What tests of AutoChunk share: small models, and measured peaks of memory and errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.dense import largest
from wf_backends.autochunk.graph import Effects, Steps, StorageTracker, capture, read_steps
from wf_backends.autochunk.slicing import Flow, trace

ANY_SLOWDOWN = 4.0  # max_slowdown of tests about memory: slices cost much time in small models


class Lambda(nn.Module):
    """A model whose forward is `function(x, *parts)`."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


class TensorConstant(nn.Module):
    """Attention with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).softmax(-1) @ x * self.factor


def flow_of(model: nn.Module, args: tuple[torch.Tensor, ...], dim: int) -> Flow:
    """The flow of all operators of a model, sliced along `dim` of its output."""
    graph = capture(model, args, {}).graph
    flow = trace([node for node in graph.nodes if node.op == "call_function"], dim)
    assert flow is not None
    return flow


def steps_of(model: nn.Module, *args: torch.Tensor) -> Steps:
    """The steps of a model's graph, in evaluation mode."""
    return read_steps(capture(model.eval(), args, {}).graph, Effects())


def attention_and_spectrum(x: torch.Tensor) -> torch.Tensor:
    """Scores of 1 MiB for 512 rows, which can be sliced, and a wall (`fft2`) that needs 256 KiB."""
    mixed = (x @ x.transpose(-1, -2)).softmax(-1) @ x
    return torch.fft.fft2(mixed.repeat(1, 8)).abs().sum(1)


def attention(x: torch.Tensor) -> torch.Tensor:
    """Residual; each row of the result needs all rows of `x`."""
    return x + ((x.tanh() @ x.tanh().mT) / 4).softmax(-1) @ x


def mlp(x: torch.Tensor) -> torch.Tensor:
    """Residual, 32 times as wide inside; each row of the result needs the same row only."""
    return x + (x.repeat(1, 1, 32).sigmoid().reshape(*x.shape, 32) * 0.1).sum(-1)


def measured_peak(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """The largest number of live bytes during a run, beyond weights and inputs."""
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    known = (*model.parameters(), *model.buffers(), *inputs)
    with torch.no_grad(), StorageTracker(known) as tracker:
        model(**kwargs)
    return tracker.peak


def profiled_peak(run: Callable[[], object]) -> int:
    """The largest number of live bytes that torch's profiler sees during a run."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def relative_error(actual: Any, expected: Any) -> float:
    """The largest max|actual - expected| / max|expected| of all tensors of two nested outputs."""
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    tensors = [(x, y) for x, y in pairs if torch.is_tensor(x) or torch.is_tensor(y)]
    return largest(float((x - y).abs().max() / y.abs().max()) for x, y in tensors)


def in_float64(kwargs: dict[str, Any]) -> dict[str, Any]:
    floats = (k for k, v in kwargs.items() if torch.is_tensor(v) and v.is_floating_point())
    return kwargs | {name: kwargs[name].double() for name in floats}
