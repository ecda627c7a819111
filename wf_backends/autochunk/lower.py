"""A captured graph with its chunk regions, as a module that runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from wf_backends.autochunk.plan import ChunkedPart
from wf_backends.autochunk.region import Bodies, ChunkedRegion, Region, kind_of
from wf_backends.autochunk.search import candidate_in
from wf_backends.graph import Effect, Effects, Steps, module_path, nbytes, read_steps, submodule
from wf_backends.slicing import join_group_norms

Window = Sequence[fx.Node]  # the nodes from a region's first operator to its last
Profile = tuple[tuple[str, int], ...]  # a module's path and live bytes, for each operator


@dataclass(frozen=True)
class Lowered:
    """The graph with its regions, each of which is one operator."""

    module: fx.GraphModule
    profile: Profile

    @property
    def peak(self) -> int:
        return max(count for _, count in self.profile)


def lower(graph: fx.Graph, windows: Sequence[tuple[Window, Region]], effects: Effects) -> Lowered:
    """A copy of the graph with chunk regions. Those of layers that are alike share a module."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    made.output(made.graph_copy(graph, copies))
    modules = {str(node.target): submodule(node) for node in graph.find_nodes(op="get_attr")}
    bodies, alike = Bodies(effects), dict[str, tuple[ChunkedRegion, Effect]]()
    for window, region in windows:
        kind = kind_of(region)
        if kind not in alike:
            module = ChunkedRegion(region, bodies)
            alike[kind] = module, _effect(region, module, effects)
        name = f"chunked_{window[0].name}"
        modules[name], effect = alike[kind]
        _replace(window, region, copies, name, effect)
    join_group_norms(made)
    module = fx.GraphModule(modules, made)
    steps = read_steps(module.graph, effects)
    paths = [module_path(step.node) for step in steps.steps]
    return Lowered(module, tuple(zip(paths, steps.peaks, strict=True)))


def _replace(
    window: Window, region: Region, copies: dict[fx.Node, fx.Node], name: str, effect: Effect
) -> None:
    """The call of a region in the place of its operators, its outputs in that of their results."""
    flow, first, graph = region.flow, copies[window[0]], copies[window[0]].graph
    operators = [copies[op.node] for op in flow.operators]
    stack = flow.end.node.meta.get("nn_module_stack")
    values = [op.node.meta["val"] for op in flow.outputs]
    with graph.inserting_before(first):
        call = graph.call_module(name, tuple(copies[node] for node, _ in flow.inputs))
        call.meta = {"val": values, "effect": effect, "nn_module_stack": stack}
        for index, op in enumerate(flow.outputs):
            output = graph.call_function(operator.getitem, (call, index))
            output.meta = {"val": values[index], "nn_module_stack": stack}
            copies[op.node].replace_all_uses_with(output)
            copies[op.node] = output
    for node in reversed(operators):
        graph.erase_node(node)
    for node in flow.others(window)[0]:
        for one in (*(n for n in node.all_input_nodes if n.op == "get_attr"), node):
            call.prepend(copies[one])


def find_region(graph: Steps, part: ChunkedPart) -> tuple[Window, Region]:
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


def _effect(region: Region, module: ChunkedRegion, effects: Effects) -> Effect:
    """What a region does to memory: its outputs whole, but for one in an input's place; of the
    rest what the slice needs that needs most."""
    outputs = region.flow.outputs[: len(module.allocated)]
    allocated = tuple(nbytes(op.node) for op in outputs)
    bodies = {id(chunk.body): chunk.body.graph for chunk in module.chunks}
    inner = max(max(read_steps(graph, effects).peaks) for graph in bodies.values())
    over = () if module.overwritten is None else (module.overwritten,)
    return Effect(allocated, (*range(-1, -1 - len(allocated), -1), *over), inner, 0)
