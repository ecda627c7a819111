"""A chunk region: a flow's operators as one module that runs them slice by slice.

The module allocates each output whole and writes it slice by slice; what lies between lives for one
slice only. The operators of a slice are a graph module of their own (a *body*); slices that compute
the same on the same shapes share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import fx, nn

from wf_backends.graph import Effects, layout
from wf_backends.slicing import Flow, emit, rows_of, size

EVEN = 16

Slice = tuple[int, int, int]  # a dimension and its rows [lo, hi)


class RegionError(ValueError):
    """A flow that cannot be cut into these slices."""


@dataclass(frozen=True)
class Chunk:
    """One turn of the loop: the body to run, what it reads of each input (None: all of it), and
    where its results belong in each output."""

    body: fx.GraphModule
    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice, ...]


@dataclass(frozen=True)
class Region:
    """A flow that is cut into slices of `length` rows of its end (the last may be shorter).

    `inputs` are the values that it reads, each with the dimension that is sliced (None: read
    whole); `outputs` those that the rest of the graph reads, the flow's end last of them. The end
    takes the memory of `overwritten`, one of the inputs (None: memory of its own).
    """

    flow: Flow
    length: int
    inputs: tuple[tuple[fx.Node, int | None], ...]
    outputs: tuple[fx.Node, ...]
    overwritten: fx.Node | None = None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The rows [lo, hi) of the flow's end in each slice."""
        rows = self.flow.rows
        return [(lo, min(lo + self.length, rows)) for lo in range(0, rows, self.length)]


def kind_of(region: Region) -> str:
    """A text that is equal for regions that compute the same: those of layers that are alike."""
    names = {node: f"x{i}" for i, node in enumerate(dict.fromkeys(n for n, _ in region.inputs))}
    lines = [f"{names[node]} {dim} {layout(node.meta['val'])}" for node, dim in region.inputs]
    for op in region.flow.operators:
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), names.__getitem__)
        names[op.node] = f"y{len(names)}"
        lines.append(f"{names[op.node]} = {op.node.target} {args} {kwargs} by {op.dim}")
    outputs = [names[node] for node in region.outputs]
    over = names.get(region.overwritten) if region.overwritten else None
    return "\n".join([*lines, f"{outputs} in slices of {region.length} over {over}"])


def slice_length(flow: Flow, chunks: int) -> int:
    """The rows of the flow's end in a slice, for at most so many chunks.

    Longer slices have a multiple of EVEN rows: 41 columns of a product take a third more time than
    48 (torch on a CPU).
    """
    length = -(-flow.rows // chunks)
    unit = lcm(flow.unit, EVEN) if length > EVEN else flow.unit
    return min(-(-length // unit) * unit, -(-flow.rows // flow.unit) * flow.unit)


def region_of(flow: Flow, length: int, overwritten: fx.Node | None = None) -> Region:
    """The flow in slices of `length` rows of its end, over those of `overwritten`.

    Raises `RegionError` where slices would not begin at whole rows of every operator.
    """
    if length < 1 or length % flow.unit:
        raise RegionError(f"slices of {length} rows: they have to be multiples of {flow.unit}")
    members = {op.node for op in flow.operators}
    inputs = {(s.node, s.dim): None for op in flow.operators for s in op.sources}
    return Region(
        flow,
        length,
        tuple((node, dim) for node, dim in inputs if node not in members),
        tuple(op.node for op in flow.operators if any(u not in members for u in op.node.users)),
        overwritten,
    )


class Bodies:
    """The bodies of all regions of a model: those that compute the same are one."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._known: dict[str, fx.GraphModule] = {}
        self._parts: dict[Any, torch.Tensor] = {}

    def part(self, node: fx.Node, where: Slice | None) -> torch.Tensor:
        """A fake tensor like the rows of the node's value: of slices as long it is the same."""
        key = node, where and (where[0], where[2] - where[1])
        if key not in self._parts:
            self._parts[key] = _narrow(node.meta["val"], where)
        return self._parts[key]

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


class ChunkedRegion(nn.Module):
    """Runs a region: ``forward(*inputs)`` returns its outputs, in the region's order.

    Raises `RegionError` where the slices do not cover an output.
    """

    def __init__(self, region: Region, bodies: Bodies) -> None:
        super().__init__()
        nodes = [node for node, _ in region.inputs]
        self.overwritten = nodes.index(region.overwritten) if region.overwritten else None
        own = region.outputs if region.overwritten is None else region.outputs[:-1]
        self.allocated = [_dense(node) for node in own]
        self.chunks = [_chunk(region, rows_of(region.flow, *b), bodies) for b in region.bounds]
        for index, node in enumerate(region.outputs):
            _check_cover(node, [chunk.outputs[index] for chunk in self.chunks])

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


def _chunk(region: Region, rows: dict[fx.Node, tuple[int, int]], bodies: Bodies) -> Chunk:
    """The slice that computes these rows."""
    graph = fx.Graph()
    needed = _needed(region, rows)
    held: dict[tuple[fx.Node, int | None], fx.Node] = {}
    for index, key in enumerate(region.inputs):
        held[key] = graph.placeholder(f"x{index}")
        held[key].meta["val"] = bodies.part(key[0], _slice(key[1], needed[key]))
    for op in region.flow.operators:
        given = []
        for source in op.sources:
            key = (source.node, source.dim)
            want = None if source.dim is None else source.rows(*rows[op.node])
            given.append(_read(graph, held[key], source.dim, needed[key], want))
        args, kwargs = _with_arguments(op.node, given)
        held[op.node, op.dim] = emit(graph, op.node, op.dim, rows[op.node], args, kwargs)
    outputs = {op.node: op.dim for op in region.flow.operators if op.node in region.outputs}
    graph.output(tuple(held[item] for item in outputs.items()))
    places = tuple((dim, *rows[node]) for node, dim in outputs.items())
    body = bodies.of(graph)
    (output,) = body.graph.find_nodes(op="output")
    for node, place, found in zip(outputs, places, output.args[0], strict=True):
        _check_result(node, found.meta["val"], bodies.part(node, place))
    return Chunk(body, tuple(_slice(dim, needed[node, dim]) for node, dim in region.inputs), places)


def _check_result(node: fx.Node, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Refuse rows that copying them would make wider, or of another dtype."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise RegionError(
            f"a slice of {node.name} has {tuple(found.shape)} of {found.dtype}, "
            f"not {tuple(wanted.shape)} of {wanted.dtype}"
        )


def _with_arguments(node: fx.Node, given: Sequence[fx.Node]) -> tuple[Any, Any]:
    """The node's arguments with its nodes replaced by these, one after the other."""
    values = iter(given)
    return fx.map_arg((node.args, node.kwargs), lambda _: next(values))


def _needed(
    region: Region, rows: dict[fx.Node, tuple[int, int]]
) -> dict[tuple[fx.Node, int | None], tuple[int, int] | None]:
    """The rows of each value, sliced along each dimension, that the slice has: all that its
    readers need, of its inputs; those that it computes, of its operators."""
    needed: dict[tuple[fx.Node, int | None], tuple[int, int] | None] = {}
    for op in region.flow.operators:
        for source in op.sources:
            key = (source.node, source.dim)
            if source.dim is None:
                needed[key] = None
                continue
            lo, hi = source.rows(*rows[op.node])
            first, last = needed.get(key) or (lo, hi)
            needed[key] = (min(lo, first), max(hi, last))
        needed[op.node, op.dim] = rows[op.node]
    return needed


def _read(
    graph: fx.Graph,
    value: fx.Node,
    dim: int | None,
    has: tuple[int, int] | None,
    want: tuple[int, int] | None,
) -> fx.Node:
    """The rows that a reader wants of a value of which the slice has more."""
    if dim is None or has is None or want is None or want == has:
        return value
    lo, hi = want[0] - has[0], want[1] - has[0]
    return graph.call_function(torch.ops.aten.slice.Tensor, (value, dim, lo, hi))


def _slice(dim: int | None, rows: tuple[int, int] | None) -> Slice | None:
    return None if dim is None or rows is None else (dim, *rows)


def _narrow(value: torch.Tensor, where: Slice | None) -> torch.Tensor:
    if where is None:
        return value
    dim, lo, hi = where
    return value.narrow(dim, lo, hi - lo)


def _dense(node: fx.Node) -> tuple[Any, ...]:
    """The layout of an output: the value's, without the holes that it has as a view of more."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise RegionError(f"{node.name} has a list of tensors, which a region cannot pass on")
    return layout(torch.empty_like(value))


def _check_cover(node: fx.Node, slices: Sequence[Slice]) -> None:
    covered = 0
    for _, lo, hi in slices:
        if lo > covered:
            break
        covered = hi
    if covered != size(node, slices[0][0]):
        raise RegionError(f"slices compute only {covered} rows of {node.name}")
