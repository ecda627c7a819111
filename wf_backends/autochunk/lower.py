"""A captured graph with its chunk regions, as a module that runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from wf_backends.autochunk.flow import around, trace
from wf_backends.autochunk.group_norm import join_group_norms
from wf_backends.autochunk.memory import Effect, Effects, profile, read_steps, submodule
from wf_backends.autochunk.plan import ChunkedPart
from wf_backends.autochunk.region import Bodies, ChunkedRegion, Region, kind_of, region_of


@dataclass(frozen=True)
class Lowered:
    """The graph with its regions. `peaks` are the live bytes at each of its steps, `names` the
    steps' names."""

    module: fx.GraphModule
    peaks: list[int]
    names: list[str]


def lower(graph: fx.Graph, parts: Sequence[ChunkedPart], effects: Effects) -> Lowered:
    """The graph with `parts` as chunk regions.

    Raises ValueError where the graph has no such region.
    """
    root, bodies = nn.Module(), Bodies()
    modules: dict[
        str, tuple[ChunkedRegion, Effect]
    ] = {}  # by kind: layers that are alike share one
    lowered = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    regions = {part.first: _find(graph, part) for part in parts}
    done: set[fx.Node] = set()

    def copy(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            copies[node] = lowered.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                root.add_module(str(node.target), submodule(node))

    for node in graph.nodes:
        if node.name in regions:
            window, region = regions[node.name]
            before, after = around(window, {op.node for op in region.flow.operators})
            copy(before)
            kind = kind_of(region)
            if kind not in modules:
                module = ChunkedRegion(region, bodies)
                modules[kind] = module, _effect(module, effects)
            root.add_module(f"chunked_{node.name}", modules[kind][0])
            call = lowered.call_module(
                f"chunked_{node.name}", tuple(copies[n] for n, _ in region.inputs)
            )
            call.meta["effect"] = modules[kind][1]
            copies.update(_outputs(lowered, call, region))
            copy(after)
            done.update(window)
        elif node not in done:
            copy([node])
    join_group_norms(lowered, ())
    steps = read_steps(lowered, effects)
    names = [step.node.name for step in steps.steps]
    return Lowered(fx.GraphModule(root, lowered), profile(steps.steps, steps.outputs), names)


def _find(graph: fx.Graph, part: ChunkedPart) -> tuple[list[fx.Node], Region]:
    """The operators from `part.first` to `part.last`, and the region that they hold."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    names = [node.name for node in nodes]
    if part.first not in names or part.last not in names:
        raise ValueError(f"the plan's region {part.first} to {part.last} is not in this graph")
    window = nodes[names.index(part.first) : names.index(part.last) + 1]
    flow = trace(window, part.dim) if window else None
    if flow is None or flow.rows != part.rows or len(flow.operators) != part.operators:
        raise ValueError(f"the plan's region {part.first} to {part.last} is not this graph's")
    return window, region_of(flow, part.length)


def _outputs(graph: fx.Graph, call: fx.Node, region: Region) -> dict[fx.Node, fx.Node]:
    """Adds the outputs of a region's call."""
    call.meta["val"] = [node.meta["val"] for node in region.outputs]
    outputs = {}
    for index, node in enumerate(region.outputs):
        outputs[node] = graph.call_function(operator.getitem, (call, index))
        outputs[node].meta["val"] = node.meta["val"]
    return outputs


def _effect(module: ChunkedRegion, effects: Effects) -> Effect:
    """What a region does to memory: its outputs whole, the rest for the slice that needs most."""
    allocated = tuple(
        torch.Size(shape).numel() * dtype.itemsize for shape, _, dtype, _ in module.outputs
    )
    bodies = {id(chunk.body): chunk.body.graph for chunk in module.chunks}
    inner = max(max(read_steps(graph, effects).peaks) for graph in bodies.values())
    return Effect(allocated, tuple(-1 - i for i in range(len(allocated))), inner, 0)
