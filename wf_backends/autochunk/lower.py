"""A captured graph with its chunk regions, as a module that runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from wf_backends.autochunk.plan import ChunkedPart
from wf_backends.autochunk.region import Bodies, ChunkedRegion, Region, kind_of
from wf_backends.autochunk.search import candidate_in
from wf_backends.graph import Effect, Effects, Steps, module_path, read_steps, submodule
from wf_backends.slicing import join_group_norms

Profile = tuple[tuple[str, int], ...]  # a module's path and live bytes, for each operator


@dataclass(frozen=True)
class Lowered:
    """The graph with its regions, each of which is one operator."""

    module: fx.GraphModule
    profile: Profile

    @property
    def peak(self) -> int:
        return max(count for _, count in self.profile)


def lower(
    graph: fx.Graph, windows: Sequence[tuple[Sequence[fx.Node], Region]], effects: Effects
) -> Lowered:
    """The graph with chunk regions: each with the nodes from its first to its last."""
    writer = _Writer(effects)
    regions = {window[0]: (window, region) for window, region in windows}
    done: set[fx.Node] = set()
    for node in graph.nodes:
        if node in regions:
            window, region = regions[node]
            before, after = region.flow.around(window)
            writer.copy(before)
            writer.call(region, f"chunked_{node.name}")
            writer.copy(after)
            done.update(window)
        elif node not in done:
            writer.copy([node])
    join_group_norms(writer.graph)
    module = fx.GraphModule(writer.root, writer.graph)
    steps = read_steps(module.graph, effects)
    paths = [module_path(step.node) for step in steps.steps]
    return Lowered(module, tuple(zip(paths, steps.peaks, strict=True)))


class _Writer:
    """Writes a graph anew, with regions as modules of `root`. Regions of layers that are alike
    share a module."""

    def __init__(self, effects: Effects) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self._effects, self._bodies = effects, Bodies(effects)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._alike: dict[str, tuple[ChunkedRegion, Effect]] = {}

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node in self._copies:
                continue
            # a region may move a node before what the graph stores, which it is given
            self.copy(arg for arg in node.all_input_nodes if arg.op == "get_attr")
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
            if node.op == "get_attr":
                self.root.add_module(str(node.target), submodule(node))

    def call(self, region: Region, name: str) -> None:
        """Adds the call of a region, and its outputs in the place of their nodes."""
        kind = kind_of(region)
        if kind not in self._alike:
            made = ChunkedRegion(region, self._bodies)
            self._alike[kind] = made, _effect(made, self._effects)
        module, effect = self._alike[kind]
        self.root.add_module(name, module)
        call = self.graph.call_module(name, tuple(self._copies[n] for n, _ in region.flow.inputs))
        stack = region.flow.end.node.meta.get("nn_module_stack")
        outputs = [op.node for op in region.flow.outputs]
        values = [node.meta["val"] for node in outputs]
        call.meta = {"val": values, "effect": effect, "nn_module_stack": stack}
        for index, node in enumerate(outputs):
            output = self.graph.call_function(operator.getitem, (call, index))
            output.meta = {"val": values[index], "nn_module_stack": stack}
            self._copies[node] = output


def find_region(graph: Steps, part: ChunkedPart) -> tuple[list[fx.Node], Region]:
    """The operators from `part.first` to `part.last`, and the region that they hold.

    Raises ValueError where the graph has no such region, or it may not overwrite that input.
    """
    named = f"the plan's region {part.first} to {part.last}"
    places = {step.node.name: place for place, step in enumerate(graph.steps)}
    lo, hi = places.get(part.first), places.get(part.last)
    if lo is None or hi is None:
        raise ValueError(f"{named} is not in this graph")
    found = candidate_in(graph, lo, hi, part.dim) if lo <= hi else None
    if found is None or (found.flow.rows, len(found.flow.operators)) != (part.rows, part.operators):
        raise ValueError(f"{named} is not this graph's")
    over = found.overwritten if part.overwritten else None
    if part.overwritten and (over is None or over.name != part.overwritten):
        raise ValueError(f"{named} may not overwrite {part.overwritten}")
    nodes = [step.node for step in graph.steps[lo : hi + 1]]
    return nodes, Region(found.flow, part.length, over)


def _effect(module: ChunkedRegion, effects: Effects) -> Effect:
    """What a region does to memory: its outputs whole, but for one in an input's place; of the
    rest what the slice needs that needs most."""
    allocated = tuple(
        torch.Size(shape).numel() * dtype.itemsize for shape, _, dtype, _ in module.allocated
    )
    bodies = {id(chunk.body): chunk.body.graph for chunk in module.chunks}
    inner = max(max(read_steps(graph, effects).peaks) for graph in bodies.values())
    over = () if module.overwritten is None else (module.overwritten,)
    return Effect(allocated, (*range(-1, -1 - len(allocated), -1), *over), inner, 0)
