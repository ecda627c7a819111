"""Lowers a captured graph and its chunk regions to a module that runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from wf_backends.autochunk.graph import (
    Effect,
    Effects,
    Steps,
    module_path,
    nbytes,
    read_steps,
    submodule,
)
from wf_backends.autochunk.ordering import store_values
from wf_backends.autochunk.plan import ChunkedPart
from wf_backends.autochunk.region import Bodies, ChunkedRegion, Region, region_key
from wf_backends.autochunk.search import candidate_in
from wf_backends.autochunk.slicing import join_group_norms, with_permutations

Profile = tuple[tuple[str, int], ...]  # (module's path, live bytes) at each operator


@dataclass(frozen=True)
class Lowered:
    """The module that runs a graph in which each region is one node, and its memory."""

    module: fx.GraphModule
    profile: Profile

    @property
    def peak(self) -> int:
        return max(live_bytes for _, live_bytes in self.profile)


def lower(graph: fx.Graph, regions: Sequence[Region], effects: Effects) -> Lowered:
    """A copy of the graph with chunk regions. Regions of identical layers share a module."""
    lowered = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lowered.output(lowered.graph_copy(graph, copies))
    modules = {str(node.target): _traceable(node) for node in graph.find_nodes(op="get_attr")}
    bodies = Bodies(effects)
    by_key: dict[str, tuple[ChunkedRegion, Effect]] = {}
    for region in regions:
        region = replace(region, flow=with_permutations(region.flow, region.overwritten))
        key = region_key(region)
        if key not in by_key:
            module = ChunkedRegion(region, bodies)
            by_key[key] = module, _effect(region, module, effects)
        name = f"chunked_{region.window[0].name}"
        modules[name], effect = by_key[key]
        _replace(region, copies, name, effect)
    for number in {number for region in regions for number, _ in region.flow.numbers}:
        if not copies[number].users:
            lowered.erase_node(copies[number])
    join_group_norms(lowered)
    module = fx.GraphModule(modules, lowered)
    steps = read_steps(module.graph, effects)
    paths = [module_path(step.node) for step in steps.steps]
    store_values(steps)
    module.recompile()
    return Lowered(module, tuple(zip(paths, steps.peaks, strict=True)))


def _traceable(node: fx.Node) -> nn.Module:
    """The module that a node names. torch.export's are compiled at their first call, which
    torch.compile cannot trace."""
    module = submodule(node)
    return fx.GraphModule(module, module.graph) if isinstance(module, fx.GraphModule) else module


def _replace(region: Region, copies: dict[fx.Node, fx.Node], name: str, effect: Effect) -> None:
    """Replaces a region's operators by one call of its module, behind the nodes that it reads."""
    flow, first = region.flow, copies[region.window[0]]
    graph = first.graph
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
    before, _ = flow.others(region.window)
    for node in before:
        for moved in (*(n for n in node.all_input_nodes if n.op == "get_attr"), node):
            call.prepend(copies[moved])


def find_region(graph: Steps, part: ChunkedPart) -> Region:
    """The region of a plan's part.

    Raises ValueError where the graph has no such region, or it may not overwrite that input.
    """
    name = f"the plan's region {part.first} to {part.last}"
    positions = {step.node.name: position for position, step in enumerate(graph.steps)}
    lo, hi = positions.get(part.first), positions.get(part.last)
    if lo is None or hi is None:
        raise ValueError(f"{name} is not in this graph")
    candidate = candidate_in(graph, lo, hi, part.dim) if lo <= hi else None
    sizes = candidate and (candidate.flow.rows, len(candidate.flow.operators))
    if candidate is None or sizes != (part.rows, part.operators):
        raise ValueError(f"{name} is not this graph's")
    overwritten = candidate.overwritten if part.overwritten else None
    if part.overwritten and (overwritten is None or overwritten.name != part.overwritten):
        raise ValueError(f"{name} may not overwrite {part.overwritten}")
    return replace(candidate, overwritten=overwritten).region(part.length)


def _effect(region: Region, module: ChunkedRegion, effects: Effects) -> Effect:
    """The memory that a region's call allocates: its outputs whole, except one that overwrites an
    input; while it runs, also the largest peak of a slice, with the one that is written late."""
    outputs = region.flow.outputs[: len(module.allocated)]
    allocated = tuple(nbytes(op.node) for op in outputs)
    bodies = dict.fromkeys(iteration.body for iteration in module.iterations)
    steps_of = {body: read_steps(body.graph, effects) for body in bodies}
    temporary = late = 0
    for iteration in module.iterations:
        steps = steps_of[iteration.body]
        temporary = max(temporary, late + max(steps.peaks))
        late = _bytes_of_end(steps) if module.is_late else 0
    overwritten = () if module.overwritten_index is None else (module.overwritten_index,)
    places = (*range(-1, -1 - len(allocated), -1), *overwritten)
    return Effect(allocated, places, temporary=temporary, flops=0)


def _bytes_of_end(steps: Steps) -> int:
    """The bytes of the last value that a body returns."""
    (output,) = steps.graph.find_nodes(op="output")
    (storage,) = steps.storages[output.args[0][-1]]
    return steps.storage_bytes[storage]
