"""A chunk region: a flow's operators as one module that runs them slice by slice.

The module allocates each output whole and writes it slice by slice; what lies between lives for one
slice only. The operators of a slice are a graph module of their own (a *body*); slices that compute
the same on the same shapes share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import lcm

import torch
from torch import fx, nn

from wf_backends.graph import Effects, layout
from wf_backends.slicing import Flow, RowsByValue, Source, Value, emit, needed_rows

EVEN, EVEN_ON_CUDA = 16, 128

Rows = tuple[int, int]  # [lo, hi)
Cut = tuple[int, int, int]  # a dimension and its rows [lo, hi)


@dataclass(frozen=True)
class Region:
    """A flow that is cut into slices of `length` rows of its end (the last may be shorter).

    The end takes the memory of `overwritten`, one of the flow's inputs (None: memory of its own).

    Raises ValueError where slices would not begin at whole rows of every operator.
    """

    flow: Flow
    length: int
    overwritten: fx.Node | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.length % self.flow.alignment:
            raise ValueError(
                f"slices of {self.length} rows: they have to be multiples of {self.flow.alignment}"
            )


def kind_of(region: Region) -> str:
    """A text that is equal for regions that compute the same: those of layers that are alike."""
    flow = region.flow
    names = {node: f"x{i}" for i, node in enumerate(dict.fromkeys(n for n, _ in flow.inputs))}
    lines = [f"{names[node]} {dim} {layout(node.meta['val'])}" for node, dim in flow.inputs]
    for op in flow.operators:
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), names.__getitem__)
        names[op.node] = f"y{len(names)}"
        lines.append(f"{names[op.node]} = {op.node.target} {args} {kwargs} by {op.dim}")
    outputs = [names[op.node] for op in flow.outputs]
    over = region.overwritten and names[region.overwritten]
    return "\n".join([*lines, f"{outputs} in slices of {region.length} over {over}"])


def slice_length(flow: Flow, chunks: int) -> int:
    """The rows of the flow's end in a slice, for at most so many chunks.

    Longer slices have a multiple of EVEN rows: 41 columns of a product take a third more time than
    48 (torch on a CPU). Much longer ones on CUDA have one of EVEN_ON_CUDA, as cuDNN's attention
    wants them.
    """
    length = -(-flow.rows // chunks)
    on_cuda = flow.end.node.meta["val"].is_cuda and length > 4 * EVEN_ON_CUDA
    even = EVEN_ON_CUDA if on_cuda else EVEN
    unit = lcm(flow.alignment, even) if length > even else flow.alignment
    return min(-(-length // unit) * unit, -(-flow.rows // flow.alignment) * flow.alignment)


def covered(slices: Iterable[Rows]) -> int:
    """How many rows, from the first one, are in slices that come one after the other."""
    end = 0
    for lo, hi in slices:
        if lo > end:
            break
        end = hi
    return end


class Bodies:
    """The bodies of all regions of a model: those that compute the same are one."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._known: dict[str, fx.GraphModule] = {}
        self._rows = cache(_rows_of)

    def part(self, node: fx.Node, where: Cut | None) -> torch.Tensor:
        """A fake tensor like the rows of the node's value: of slices as long it is the same."""
        return self._rows(node, where and (where[0], 0, where[2] - where[1]))

    def of(self, graph: fx.Graph) -> fx.GraphModule:
        """The module of a graph whose placeholders have their `meta["val"]`."""
        given = [layout(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
        lines = (f"{node.target} {node.args} {node.kwargs}" for node in graph.nodes)
        key = "\n".join([str(given), *lines])
        if key not in self._known:
            for node in graph.nodes:
                if node.op == "call_function":
                    node.meta["val"] = self._effects.of(node).result
            self._known[key] = fx.GraphModule(nn.Module(), graph)
        return self._known[key]


@dataclass(frozen=True)
class Chunk:
    """One turn of the loop: the body to run, what it reads of each input (None: all of it), and
    where its results belong in each output."""

    body: fx.GraphModule
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut, ...]


class ChunkedRegion(nn.Module):
    """Runs a region: ``forward(*inputs)`` returns its flow's outputs."""

    def __init__(self, region: Region, bodies: Bodies) -> None:
        super().__init__()
        flow, over = region.flow, region.overwritten
        self.overwritten = [node for node, _ in flow.inputs].index(over) if over else None
        own = flow.outputs[:-1] if over else flow.outputs
        # as the values lie, without the holes that these have as views of more
        self.allocated = [layout(torch.empty_like(op.node.meta["val"])) for op in own]
        starts = range(0, flow.rows, region.length)
        bounds = ((lo, min(lo + region.length, flow.rows)) for lo in starts)
        self.chunks = [_chunk(flow, needed_rows(flow, *rows), bodies) for rows in bounds]
        for index, op in enumerate(flow.outputs):
            rows = covered(chunk.outputs[index][1:] for chunk in self.chunks)
            assert rows == op.rows, f"slices compute only {rows} rows of {op.node.name}"

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        outputs = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in self.allocated
        ]
        if self.overwritten is not None:
            outputs.append(values[self.overwritten])
        for chunk in self.chunks:
            given = (_narrow(v, s) for v, s in zip(values, chunk.inputs, strict=True))
            results = chunk.body(*given)
            for output, where, result in zip(outputs, chunk.outputs, results, strict=True):
                _narrow(output, where).copy_(result)
            del result, results  # a slice's results go before the next slice begins
        return outputs


def _chunk(flow: Flow, rows: RowsByValue, bodies: Bodies) -> Chunk:
    """The slice that computes these rows."""
    graph, held = fx.Graph(), dict[Value, fx.Node]()
    inputs = tuple(None if dim is None else (dim, *rows[node, dim]) for node, dim in flow.inputs)
    outputs = tuple((op.dim, *rows[op.value]) for op in flow.outputs)
    for index, (value, where) in enumerate(zip(flow.inputs, inputs, strict=True)):
        held[value] = graph.placeholder(f"x{index}")
        held[value].meta["val"] = bodies.part(value[0], where)
    for op in flow.operators:
        read = iter([_read(graph, held[s.value], s, rows[op.value], rows) for s in op.sources])
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda _, own=read: next(own))
        held[op.value] = emit(graph, op.node, op.dim, rows[op.value], args, kwargs)
    graph.output(tuple(held[op.value] for op in flow.outputs))
    body = bodies.of(graph)
    (output,) = body.graph.find_nodes(op="output")
    for op, where, result in zip(flow.outputs, outputs, output.args[0], strict=True):
        found, wanted = result.meta["val"], bodies.part(op.node, where)
        # copying others would make them wider, or of another dtype
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (op.node, found, wanted)
    return Chunk(body, inputs, outputs)


def _read(
    graph: fx.Graph, held: fx.Node, source: Source, reads: Rows, rows: RowsByValue
) -> fx.Node:
    """What rows `reads` of an operator need of a value, of which the slice may hold more."""
    if source.dim is None:
        return held
    (lo, hi), (first, last) = source.rows(*reads), rows[source.value]
    if (lo, hi) == (first, last):
        return held
    cut = held, source.dim, lo - first, hi - first
    return graph.call_function(torch.ops.aten.slice.Tensor, cut)


def _rows_of(node: fx.Node, where: Cut | None) -> torch.Tensor:
    return _narrow(node.meta["val"], where)


def _narrow(value: torch.Tensor, where: Cut | None) -> torch.Tensor:
    if where is None:
        return value
    dim, lo, hi = where
    return value.narrow(dim, lo, hi - lo)
