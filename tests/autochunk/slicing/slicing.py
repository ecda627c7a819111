"""Rows of an operator's output, computed from the rows of its inputs that its rule names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wf_backends.autochunk.slicing.rules import alignment, emit, sources


def run_slice(
    node: fx.Node, dim: int, lo: int, hi: int, value_of: Callable[[fx.Node], Any]
) -> list[Tensor]:
    """Rows [lo, hi) of each output. The computation gets the rows that the rule names, no others.

    Args:
        value_of: the value of an argument of `node`.
    """
    graph, inputs = fx.Graph(), []
    reads = iter(sources(node, dim) or ())

    def placeholder(argument: fx.Node) -> fx.Node:
        source = next(reads)
        assert source.node is argument
        value = value_of(argument)
        if source.dim is not None:
            value = rows_of(value, source.dim, *source.rows(lo, hi))
        inputs.append(value)
        return graph.placeholder(f"input_{len(inputs)}")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), placeholder)
    assert next(reads, None) is None
    graph.output(emit(graph, node, dim, (lo, hi), args, kwargs))
    return tensors(fx.Interpreter(torch.nn.Module(), graph=graph).run(*inputs))


def rows_of(value: Any, dim: int, lo: int, hi: int) -> Any:
    """Rows of a tensor, or of each tensor of a list."""
    if isinstance(value, Tensor):
        return value.narrow(dim, lo, hi - lo).clone()
    return [rows_of(tensor, dim, lo, hi) for tensor in value]


def tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def assert_slices(
    node: fx.Node, dim: int, output: Any, value_of: Callable[[fx.Node], Any], seed: int
) -> None:
    """Slices along `dim` equal the rows of `output`, to 1e-12 in float64 and 1e-5 in float32.

    The first slice, the last one, one of all rows, and two that are drawn from the seed.
    """
    step, size = alignment(sources(node, dim) or ()), tensors(output)[0].shape[dim]
    borders = range(0, size + 1, step)
    drawn = [sorted(random.Random(seed).sample(borders, 2)) for _ in range(2)]
    for lo, hi in [(0, step), (size - step, size), (0, size), *drawn]:
        slices = run_slice(node, dim, lo, hi, value_of)
        for actual, expected in zip(slices, tensors(rows_of(output, dim, lo, hi)), strict=True):
            tolerance = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
