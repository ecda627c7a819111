"""The memory of a graph's values over its run, from liveness alone: the model does not run.

A *storage* is a block of memory; several values may be views of it. It is live from the operator
that allocates it to the last use of any of its views. The profile of a graph is the number of live
bytes at each of its steps, beyond those before the run (weights and inputs).

Each operator is run once on fake tensors to find what it allocates, which of its results are views,
and how much memory it needs for a moment. Equal calls (operator, shapes, layouts) are run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from wf_backends.autochunk.graph.blocks import submodule
from wf_backends.autochunk.graph.capture import layout, tensors
from wf_backends.autochunk.graph.experts import fake_grouped_mm
from wf_backends.autochunk.graph.tracker import StorageTracker
from wf_backends.autochunk.slicing import written


def _attention_flops(rows: int, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention for the shapes of its tensors, with rows in dimension `rows` and heads, of
    which keys may have fewer, in the other of 1 and 2."""
    return 2 * prod(query[:-1]) * key[rows] * (query[-1] + value[-1])


_aten = torch.ops.aten
# FLOPs of fused attention. torch's own counter leaves out CPUs, refuses fewer key heads than query
# heads, and takes rows for heads where rows come first.
FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: partial(_attention_flops, 2),
    _aten._scaled_dot_product_flash_attention: partial(_attention_flops, 2),
    _aten._scaled_dot_product_efficient_attention: partial(_attention_flops, 2),
    _aten._scaled_dot_product_cudnn_attention: partial(_attention_flops, 2),
    _aten._flash_attention_forward: partial(_attention_flops, 1),
    _aten._efficient_attention_forward: partial(_attention_flops, 1),
}


@dataclass(frozen=True)
class Effect:
    """What one call of an operator allocates, returns and computes.

    Attributes:
        allocated: bytes of each new storage among its results.
        places: the storage of each tensor among its results: i >= 0 is that of the call's i-th
            tensor argument, -1 - j the j-th new one.
        temporary: bytes that it needs for a moment beyond its results.
        signature: equal for calls of one operator on tensors of the same layouts.
        result: its results as fake tensors, of use only for their layouts.
    """

    allocated: tuple[int, ...]
    places: tuple[int, ...]
    temporary: int
    flops: int
    signature: int = -1
    result: Any = None


class Effects:
    """Runs each distinct call of an operator once, on fake tensors."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._effects: dict[tuple[Any, str], Effect] = {}
        self._layouts: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> Effect:
        """The effect of a `call_function` node whose arguments have their `meta["val"]`."""
        key = node.target, repr(fx.map_arg((node.args, node.kwargs), self._layout))
        if key not in self._effects:
            self._effects[key] = self._run(node, len(self._effects))
        return self._effects[key]

    def _layout(self, node: fx.Node) -> str:
        """A text that is equal for nodes whose tensors have the same layouts."""
        if node not in self._layouts:
            origin = node.target if node.op == "get_attr" else node.meta.get("whole")
            self._layouts[node] = f"<{origin} {[layout(tensor) for tensor in tensors(node)]}>"
        return self._layouts[node]

    def _run(self, node: fx.Node, signature: int) -> Effect:
        assert callable(node.target)
        with self._mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), _fake_value)
            inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            counter = FlopCounterMode(display=False, custom_mapping=FLOPS)
            with fake_grouped_mm(), counter, StorageTracker(inputs) as tracker:
                result = node.target(*args, **kwargs)
        # Reversed: of inputs that share a storage, the first counts.
        place_of = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(inputs)))}
        allocated, places = [], []
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in place_of:
                    place_of[storage._cdata] = -1 - len(allocated)
                    allocated.append(storage.nbytes())
                places.append(place_of[storage._cdata])
        temporary, flops = tracker.peak - sum(allocated), counter.get_total_flops()
        return Effect(tuple(allocated), tuple(places), temporary, flops, signature, result)


def _fake_value(node: fx.Node) -> Any:
    """New tensors with the layouts of the node's value."""
    if node.op == "get_attr":
        return submodule(node)
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
        node.meta.get("val"),
    )


@dataclass(frozen=True)
class GraphStep:
    """One node of a graph and the storages that it uses.

    `reads` are the storages that it reads or returns views of; `allocates` are the bytes of each
    storage that it allocates; `temporary`, `flops` and `signature` are those of its `Effect`.
    """

    node: fx.Node
    reads: tuple[int, ...]
    allocates: Mapping[int, int]
    temporary: int = 0
    flops: int = 0
    signature: int = -1


@dataclass(frozen=True)
class Steps:
    """A graph's operators in order, and its storages by number."""

    graph: fx.Graph
    effects: Effects
    steps: list[GraphStep]
    storages: dict[fx.Node, tuple[int, ...]]  # of each node's tensors
    storage_bytes: dict[int, int]  # of the storages that operators allocate
    outputs: frozenset[int]  # the storages that the graph returns

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {step.node: i for i, step in enumerate(self.steps)}

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last step that uses each storage; len(steps) for the graph's outputs."""
        return last_uses(self.steps) | dict.fromkeys(self.outputs, len(self.steps))

    @cached_property
    def written_storages(self) -> dict[int, set[int]]:
        """The storages that each step writes to in place, by the index of the step."""
        return {
            i: {storage for value in written(step.node) for storage in self.storages[value]}
            for i, step in enumerate(self.steps)
            if written(step.node)
        }

    @cached_property
    def nodes_by_storage(self) -> dict[int, list[fx.Node]]:
        """The nodes whose tensors lie in each storage; the first of them allocates it."""
        nodes: dict[int, list[fx.Node]] = {}
        for node, storages in self.storages.items():
            for storage in storages:
                nodes.setdefault(storage, []).append(node)
        return nodes

    @cached_property
    def live(self) -> list[int]:
        """The live bytes before each step, and after the last one."""
        return profile(self.steps, self.outputs)[0]

    @cached_property
    def peaks(self) -> list[int]:
        """The live bytes while each step runs."""
        return profile(self.steps, self.outputs)[1]


def read_steps(graph: fx.Graph, effects: Effects) -> Steps:
    """The steps of a graph whose nodes have their `meta["val"]`.

    A chunk region (`call_module`) has its effect in `meta["effect"]`.
    """
    steps: list[GraphStep] = []
    storages: dict[fx.Node, tuple[int, ...]] = {}
    storage_bytes: dict[int, int] = {}
    outputs: frozenset[int] = frozenset()
    numbers = itertools.count()
    for node in graph.nodes:
        reads = tuple(s for arg in arguments(node) for s in storages[arg])
        if node.op == "output":
            outputs = frozenset(reads)
        if node.op not in ("call_function", "call_module"):
            storages[node] = tuple(next(numbers) for _ in tensors(node))
            continue
        effect = node.meta["effect"] if node.op == "call_module" else effects.of(node)
        allocates = {next(numbers): count for count in effect.allocated}
        storage_bytes.update(allocates)
        new = tuple(allocates)
        storages[node] = tuple(reads[p] if p >= 0 else new[-1 - p] for p in effect.places)
        costs = effect.temporary, effect.flops, effect.signature
        steps.append(GraphStep(node, reads, allocates, *costs))
    return Steps(graph, effects, steps, storages, storage_bytes, outputs)


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments in order; a node that is passed twice is there twice."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)  # type: ignore[arg-type]
    return nodes


def last_uses(steps: Sequence[GraphStep]) -> dict[int, int]:
    """The last step that reads or allocates each storage."""
    return {s: i for i, step in enumerate(steps) for s in (*step.allocates, *step.reads)}


def profile(
    steps: Sequence[GraphStep],
    kept: Container[int],
    sizes: Mapping[int, int] | None = None,
    live: int = 0,
) -> tuple[list[int], list[int]]:
    """The live bytes before each step and after the last one, and those while each step runs;
    `live` before the first one.

    The last step that uses a storage frees it, unless it is in `kept`. `sizes` has the bytes of
    storages that were live before, or that a step puts into another one's memory.
    """
    allocated = {s: count for step in steps for s, count in step.allocates.items()}
    sums = [sum(step.allocates.values()) for step in steps]
    change = list(sums)
    for storage, position in last_uses(steps).items():
        if storage not in kept:
            change[position] -= allocated.get(storage) or (sizes or {}).get(storage, 0)
    before = list(itertools.accumulate(change, initial=live))
    pairs = zip(before, sums, steps, strict=False)
    return before, [count + new + step.temporary for count, new, step in pairs]
