"""A chunk region: the operators of a flow as one module that runs them slice by slice.

The module allocates each output whole and writes it slice by slice; all other values live for one
slice only. The operators of a slice form a graph module, the *body*; slices that compute the same
on the same shapes share one body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

import torch
from torch import fx, nn

from wf_backends.autochunk.graph import Effects, layout
from wf_backends.autochunk.ordering import Cut, Write, seem_written, write
from wf_backends.autochunk.slicing import Flow, RowsByValue, Source, Value, emit, needed_rows

ROW_MULTIPLE, ROW_MULTIPLE_ON_CUDA = 16, 128  # of long slices, see `slice_length`

RowRange = tuple[int, int]  # rows [lo, hi)


@dataclass(frozen=True)
class Region:
    """A flow in slices of `length` rows of its end (the last slice may be shorter).

    `window` are the graph's nodes from the first operator to the last, also those outside the flow.
    The end's output is written to the memory of `overwritten`, an input (None: to its own memory).

    Raises ValueError if `length` is no multiple of the flow's alignment, or if a slice reads rows
    of `overwritten` that were written before the slice in front of it was.
    """

    window: Sequence[fx.Node]
    flow: Flow
    length: int
    overwritten: fx.Node | None

    def __post_init__(self) -> None:
        if self.length < 1 or self.length % self.flow.alignment:
            raise ValueError(
                f"slices of {self.length} rows: they have to be multiples of {self.flow.alignment}"
            )
        before = rows_before(self.flow, self.overwritten)
        if self.length < before:
            raise ValueError(
                f"slices of {self.length} rows: they read {before} rows before their own"
            )


def rows_before(flow: Flow, node: fx.Node | None) -> int:
    """How many rows of an input (None: 0) a slice reads before those that it computes: a halo."""
    if node is None:
        return 0
    _, rows = flow.halves
    first, _ = rows[flow.end.value]
    reads = (
        source.rows(*rows[op.value])[0]
        for op in flow.operators
        for source in op.sources
        if source.node is node
    )
    return max(0, first - min(reads))


def region_key(region: Region) -> str:
    """A text that is equal for regions that compute the same, as those of identical layers do."""
    flow = region.flow
    names = {node: f"x{i}" for i, node in enumerate(dict.fromkeys(n for n, _ in flow.inputs))}
    lines = [f"{names[node]} {dim} {layout(node.meta['val'])}" for node, dim in flow.inputs]
    for number, _ in flow.numbers:
        names[number] = f"{number.target} {number.args} {number.kwargs}"
    for op in flow.operators:
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), names.__getitem__)
        names[op.node] = f"y{len(names)}"
        lines.append(f"{names[op.node]} = {op.node.target} {args} {kwargs} by {op.dim}")
    outputs = [names[op.node] for op in flow.outputs]
    overwritten = region.overwritten and names[region.overwritten]
    return "\n".join([*lines, f"{outputs} in slices of {region.length} over {overwritten}"])


def slice_length(flow: Flow, num_slices: int) -> int:
    """The rows of the flow's end in a slice, for at most `num_slices` slices.

    Slices above ROW_MULTIPLE rows have a multiple of it: a product of 41 columns takes a third more
    time than one of 48 (torch on a CPU). On CUDA slices above 4 * ROW_MULTIPLE_ON_CUDA rows have a
    multiple of that, for cuDNN's attention.
    """
    length = -(-flow.rows // num_slices)
    on_cuda = length > 4 * ROW_MULTIPLE_ON_CUDA and flow.end.node.meta["val"].is_cuda
    multiple = ROW_MULTIPLE_ON_CUDA if on_cuda else ROW_MULTIPLE
    alignment = lcm(flow.alignment, multiple) if length > multiple else flow.alignment
    rounded = -(-length // alignment) * alignment
    return min(rounded, -(-flow.rows // flow.alignment) * flow.alignment)


def covered_rows(slices: Iterable[RowRange]) -> int:
    """How many rows, from row 0 on, consecutive slices cover without a gap."""
    end = 0
    for lo, hi in slices:
        if lo > end:
            break
        end = hi
    return end


class Bodies:
    """The bodies of all regions of a model, one for all slices that compute the same."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._modules: dict[str, fx.GraphModule] = {}
        self._fake_rows = cache(lambda node, cut: _narrow(node.meta["val"], cut))

    def fake_rows(self, node: fx.Node, cut: Cut | None) -> torch.Tensor:
        """A fake tensor like these rows of the node's value, one for all slices of a length."""
        return self._fake_rows(node, cut and (cut[0], 0, cut[2] - cut[1]))

    def module(self, graph: fx.Graph) -> fx.GraphModule:
        """The body that runs a graph, whose placeholders have their `meta["val"]`."""
        layouts = [layout(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
        lines = (f"{node.target} {node.args} {node.kwargs}" for node in graph.nodes)
        key = "\n".join([str(layouts), *lines])
        if key not in self._modules:
            for node in graph.nodes:
                if node.op == "call_function":
                    node.meta["val"] = self._effects.of(node).result
            self._modules[key] = fx.GraphModule(nn.Module(), graph)
        return self._modules[key]


@dataclass(frozen=True)
class Iteration:
    """One iteration of the loop: the body to run, the rows that it reads of each input (None: the
    whole input), and the rows of each output that it computes."""

    body: fx.GraphModule
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut, ...]


class ChunkedRegion(nn.Module):
    """Runs a region: ``forward(*inputs)`` returns its flow's outputs.

    If slices read rows that the slice in front of them overwrites, a slice is written after the
    next one was computed.
    """

    def __init__(self, region: Region, bodies: Bodies) -> None:
        super().__init__()
        flow, overwritten = region.flow, region.overwritten
        self.overwritten_index: int | None = None  # of the input that the last output overwrites
        self.seem_written = seem_written(flow, overwritten)
        self.is_late = rows_before(flow, overwritten) > 0
        allocated = flow.outputs
        if overwritten is not None:
            self.overwritten_index = [node for node, _ in flow.inputs].index(overwritten)
            allocated = flow.outputs[:-1]
        # layouts of the outputs; empty_like makes them dense where the values are views
        self.allocated = [layout(torch.empty_like(op.node.meta["val"])) for op in allocated]
        starts = range(0, flow.rows, region.length)
        bounds = ((lo, min(lo + region.length, flow.rows)) for lo in starts)
        self.iterations = [_iteration(flow, needed_rows(flow, *rows), bodies) for rows in bounds]
        for index, op in enumerate(flow.outputs):
            rows = covered_rows(iteration.outputs[index][1:] for iteration in self.iterations)
            assert rows == op.rows, f"slices compute only {rows} rows of {op.node.name}"

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in self.allocated
        ]
        if self.overwritten_index is not None:
            outputs.append(inputs[self.overwritten_index])
        late: list[Write] = []
        for iteration in self.iterations:
            slices = (_narrow(x, cut) for x, cut in zip(inputs, iteration.inputs, strict=True))
            results = iteration.body(*slices)
            writes = [*late, *zip(outputs, iteration.outputs, results, strict=True)]
            late = [writes.pop()] if self.is_late else []
            is_last = iteration is self.iterations[-1]
            read = [] if is_last else [inputs[index] for index in self.seem_written]
            write(writes, [rows for _, _, rows in late], read)
            del results, writes  # frees a slice's results before the next slice begins
        write(late, [], [])
        return outputs


def _iteration(flow: Flow, rows: RowsByValue, bodies: Bodies) -> Iteration:
    """The iteration that computes these rows."""
    graph = fx.Graph()
    nodes: dict[Value, fx.Node] = {}  # of the body, for each value of the flow
    inputs = tuple(None if dim is None else (dim, *rows[node, dim]) for node, dim in flow.inputs)
    outputs = tuple((op.dim, *rows[op.value]) for op in flow.outputs)
    for index, (value, cut) in enumerate(zip(flow.inputs, inputs, strict=True)):
        nodes[value] = graph.placeholder(f"x{index}")
        nodes[value].meta["val"] = bodies.fake_rows(value[0], cut)
    for number, dim in flow.numbers:
        nodes[number, dim] = graph.node_copy(number)
    for op in flow.operators:
        op_rows = rows[op.value]
        sliced = iter([_slice_source(graph, nodes[s.value], s, op_rows, rows) for s in op.sources])
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda _, it=sliced: next(it))
        nodes[op.value] = emit(graph, op.node, op.dim, op_rows, args, kwargs)
    graph.output(tuple(nodes[op.value] for op in flow.outputs))
    body = bodies.module(graph)
    (output,) = body.graph.find_nodes(op="output")
    for op, cut, result in zip(flow.outputs, outputs, output.args[0], strict=True):
        actual, expected = result.meta["val"], bodies.fake_rows(op.node, cut)
        # copy_ would broadcast another shape and convert another dtype
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), op.node
    return Iteration(body, inputs, outputs)


def _slice_source(
    graph: fx.Graph, node: fx.Node, source: Source, op_rows: RowRange, rows: RowsByValue
) -> fx.Node:
    """The rows of `node` that an operator reads for its rows `op_rows`. `node` may hold more rows,
    those that all its readers need: `rows[source.value]`."""
    if source.dim is None:
        return node
    lo, hi = source.rows(*op_rows)
    first, last = rows[source.value]
    if (lo, hi) == (first, last):
        return node
    args = node, source.dim, lo - first, hi - first
    return graph.call_function(torch.ops.aten.slice.Tensor, args)


def _narrow(value: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return value
    dim, lo, hi = cut
    return value.narrow(dim, lo, hi - lo)
