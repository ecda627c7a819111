"""Computing rows of one operator's output from rows of its inputs, as the rules say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wf_backends.slicing.rules import alignment, emit, sources


def run_slice(
    node: fx.Node, dim: int, lo: int, hi: int, value_of: Callable[[fx.Node], Any]
) -> list[Tensor]:
    """Rows [lo, hi) of each output, from the rows of the inputs that the rule names, no others."""
    graph, inputs = fx.Graph(), []
    found = iter(sources(node, dim) or ())

    def replaced(source: fx.Node) -> fx.Node:
        read = next(found)
        assert read.node is source
        value = value_of(source)
        if read.dim is not None:
            first, last = read.rows(lo, hi)
            value = rows_of(value, read.dim, first, last)
        inputs.append(value)
        return graph.placeholder(f"input_{len(inputs)}")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), replaced)
    assert next(found, None) is None
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
    node: fx.Node, dim: int, whole: Any, value_of: Callable[[fx.Node], Any], seed: int
) -> None:
    """Every cut gives the same rows as the whole call, to 1e-12 in float64."""
    step, size = alignment(sources(node, dim) or ()), tensors(whole)[0].shape[dim]
    drawn = [sorted(random.Random(seed).sample(range(0, size + 1, step), 2)) for _ in range(2)]
    for lo, hi in [(0, step), (size - step, size), (0, size), *drawn]:
        ours = run_slice(node, dim, lo, hi, value_of)
        for rows, expected in zip(ours, tensors(rows_of(whole, dim, lo, hi)), strict=True):
            accuracy = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
            torch.testing.assert_close(rows, expected, rtol=accuracy, atol=accuracy)
