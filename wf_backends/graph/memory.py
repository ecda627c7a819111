"""The memory of a graph's values over its run, from liveness alone: no run of the model.

A *storage* is a block of memory; several values may be views of it. It lives from the operator that
allocates it to the last use of any of its views. The profile of a graph is the number of live bytes
at each of its steps, beyond what is there before the run (weights and inputs).

What an operator allocates, returns as a view and needs for a moment is found by running it once on
fake tensors; equal calls (operator, shapes, layouts) are run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from wf_backends.graph.capture import layout, tensors
from wf_backends.graph.experts import grouped_products_are_fake
from wf_backends.graph.tracker import StorageTracker
from wf_backends.slicing import Source, sources, writes, written


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes (b, h, i, d), (b, g, j, d) and (b, g, j, v), g divides h."""
    b, h, i, d = query
    return 2 * b * h * i * key[-2] * (d + value[-1])


def _packed_attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes (b, i, h, d), (b, j, g, d) and (b, j, g, v)."""
    b, i, h, d = query
    return 2 * b * h * i * key[1] * (d + value[-1])


_aten = torch.ops.aten
# Of fused attention. torch's counter leaves out CPUs, refuses fewer key heads than query heads,
# and takes rows for heads where these come first.
FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention: _attention_flops,
    _aten._scaled_dot_product_efficient_attention: _attention_flops,
    _aten._scaled_dot_product_cudnn_attention: _attention_flops,
    _aten._flash_attention_forward: _packed_attention_flops,
    _aten._efficient_attention_forward: _packed_attention_flops,
}


@dataclass(frozen=True)
class Effect:
    """What one call of an operator does.

    `allocated` are the bytes of the storages that it returns and that are new. `places` says where
    each tensor that it returns lies: i >= 0 in the storage of the call's i-th tensor, -1 - j in the
    j-th new one. `temporary` is what it needs for a moment beyond its results, in bytes; `flops`
    what it computes. `kind` is equal for calls of one operator on the same layouts, `result` what
    they give: fake tensors, of use for their layouts alone.
    """

    allocated: tuple[int, ...]
    places: tuple[int, ...]
    temporary: int
    flops: int
    kind: int = -1
    result: Any = None


class Effects:
    """Runs each distinct call of an operator once, on fake tensors."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._known: dict[tuple[Any, str], Effect] = {}
        self._layout_of: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> Effect:
        """The effect of a `call_function` node whose arguments have their `meta["val"]`."""
        key = node.target, repr(fx.map_arg((node.args, node.kwargs), self._layout))
        if key not in self._known:
            self._known[key] = self._run(node, len(self._known))
        return self._known[key]

    def _layout(self, node: fx.Node) -> str:
        """A text that is equal for nodes whose tensors have the same layouts."""
        if node not in self._layout_of:
            which = node.target if node.op == "get_attr" else node.meta.get("whole")
            self._layout_of[node] = f"<{which} {[layout(tensor) for tensor in tensors(node)]}>"
        return self._layout_of[node]

    def _run(self, node: fx.Node, kind: int) -> Effect:
        assert callable(node.target)
        with self._mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), _fresh)
            inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            flops = FlopCounterMode(display=False, custom_mapping=FLOPS)
            with grouped_products_are_fake(), flops as counter, StorageTracker(inputs) as tracker:
                result = node.target(*args, **kwargs)
        known = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(inputs)))}
        allocated, places = [], []
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in known:
                    known[storage._cdata] = -1 - len(allocated)
                    allocated.append(storage.nbytes())
                places.append(known[storage._cdata])
        memory = tuple(allocated), tuple(places), tracker.peak - sum(allocated)
        return Effect(*memory, counter.get_total_flops(), kind, result)


def _fresh(node: fx.Node) -> Any:
    """Tensors like the node's value."""
    if node.op == "get_attr":
        return submodule(node)
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
        node.meta.get("val"),
    )


def submodule(node: fx.Node) -> nn.Module:
    """The module that a `get_attr` node names, such as the body of a higher-order operator."""
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))


@dataclass(frozen=True)
class Step:
    """One node of a graph as memory sees it.

    `reads` are the storages that it reads or returns views of; `allocates` the bytes of those that
    it allocates; `temporary`, `flops` and `kind` as of its `Effect`.
    """

    node: fx.Node
    reads: tuple[int, ...]
    allocates: Mapping[int, int]
    temporary: int = 0
    flops: int = 0
    kind: int = -1


@dataclass(frozen=True)
class Steps:
    """A graph's operators in order, and its storages by number."""

    graph: fx.Graph
    effects: Effects
    steps: list[Step]
    of: dict[fx.Node, tuple[int, ...]]  # the storages of each node's tensors
    size: dict[int, int]  # the bytes of those that operators allocate
    outputs: frozenset[int]  # those that the graph returns
    _sources: dict[tuple[int, int], tuple[Source, ...] | None] = field(default_factory=dict)

    def sources(self, node: fx.Node, dim: int) -> tuple[Source, ...] | None:
        """As `slicing.sources`, found once for each kind of call."""
        key = self.steps[self.position[node]].kind, dim
        if writes(node):
            return sources(node, dim)
        if key not in self._sources:
            self._sources[key] = sources(node, dim)
        known, of = self._sources[key], arguments(node)
        return known and tuple(replace(one, node=arg) for one, arg in zip(known, of, strict=True))

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {step.node: i for i, step in enumerate(self.steps)}

    @cached_property
    def last(self) -> dict[int, int]:
        """The last step that reads each storage; one past the end for the graph's outputs."""
        return last_uses(self.steps) | dict.fromkeys(self.outputs, len(self.steps))

    @cached_property
    def written(self) -> dict[int, set[int]]:
        """The storages that each step writes to, of those that do."""
        found = {i: written(step.node) for i, step in enumerate(self.steps) if writes(step.node)}
        return {i: {s for value in values for s in self.of[value]} for i, values in found.items()}

    @cached_property
    def nodes(self) -> dict[int, list[fx.Node]]:
        """The nodes whose tensors lie in each storage; the first of them allocates it."""
        found: dict[int, list[fx.Node]] = {}
        for node, storages in self.of.items():
            for storage in storages:
                found.setdefault(storage, []).append(node)
        return found

    @cached_property
    def live(self) -> list[int]:
        """The live bytes before each step, and after the last one."""
        return live_bytes(self.steps, self.outputs)

    @cached_property
    def peaks(self) -> list[int]:
        """The live bytes while each step runs."""
        return profile(self.steps, self.outputs)


def read_steps(graph: fx.Graph, effects: Effects) -> Steps:
    """The steps of a graph whose nodes have their `meta["val"]`.

    A chunk region (`call_module`) has its effect in `meta["effect"]`.
    """
    steps: list[Step] = []
    of: dict[fx.Node, tuple[int, ...]] = {}
    size: dict[int, int] = {}
    outputs: frozenset[int] = frozenset()
    numbers = itertools.count()
    for node in graph.nodes:
        reads = tuple(s for arg in arguments(node) for s in of[arg])
        if node.op == "output":
            outputs = frozenset(reads)
        if node.op not in ("call_function", "call_module"):
            of[node] = tuple(next(numbers) for _ in tensors(node))
            continue
        effect = node.meta["effect"] if node.op == "call_module" else effects.of(node)
        allocates = {next(numbers): count for count in effect.allocated}
        size.update(allocates)
        new = tuple(allocates)
        of[node] = tuple(reads[p] if p >= 0 else new[-1 - p] for p in effect.places)
        steps.append(Step(node, reads, allocates, effect.temporary, effect.flops, effect.kind))
    return Steps(graph, effects, steps, of, size, outputs)


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, once for each time that they stand there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)  # type: ignore[arg-type]
    return found


def last_uses(steps: Sequence[Step]) -> dict[int, int]:
    """The last step that reads or allocates each storage."""
    return {s: i for i, step in enumerate(steps) for s in (*step.allocates, *step.reads)}


def live_bytes(
    steps: Sequence[Step],
    kept: Container[int],
    sizes: Mapping[int, int] | None = None,
    live: int = 0,
) -> list[int]:
    """The live bytes before each step, and after the last one, of `live` before the first one.

    `sizes` are the bytes of storages among them. Those that a step reads, and that are not in
    `kept`, die with the last step that reads them.
    """
    own = {s: count for step in steps for s, count in step.allocates.items()}
    change = [sum(step.allocates.values()) for step in steps]
    for storage, position in last_uses(steps).items():
        if storage not in kept:
            change[position] -= own.get(storage) or (sizes or {}).get(storage, 0)
    return list(itertools.accumulate(change, initial=live))


def profile(
    steps: Sequence[Step],
    kept: Container[int],
    sizes: Mapping[int, int] | None = None,
    live: int = 0,
) -> list[int]:
    """The live bytes while each step runs. Arguments as `live_bytes`."""
    before = zip(steps, live_bytes(steps, kept, sizes, live), strict=False)
    return [count + sum(step.allocates.values()) + step.temporary for step, count in before]
