"""Copies of operators, one in front of each reader, so that they are sliced with the reader.

A mask of all queries and keys that every layer reads is live during the whole pass, and no region
can slice it. It is computed from small tensors, so each reader can have a copy of its operators. A
normed input that several linears read is live beside the input itself: each reader can compute it
again from that input, which is live anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from torch import fx

from wf_backends.autochunk.graph.capture import nbytes
from wf_backends.autochunk.graph.memory import Steps, read_steps
from wf_backends.autochunk.slicing import rule_of, written

Copied = Literal["", "masks", "norms"]
"""No copies; of values computed from small tensors; also of values computed from live tensors."""
SMALL_RATIO = 16  # a tensor is small if the value has at least this many times its bytes
MAX_OPERATORS = 32  # of one copy


def with_copies(steps: Steps, what: Copied) -> Steps | None:
    """The steps of the graph with copies; None if there is no value to copy.

    A value is copied if it is computed without matrix products, and read by two or more operators
    that are not copied.
    """
    writers = [step.node for step in steps.steps if written(step.node)]
    chains: dict[fx.Node, set[fx.Node]] = {}  # the operators that compute each value
    for step in steps.steps:
        chain = _chain(step.node, steps, what == "norms")
        if chain and all(_may_be_copied_with(writer, chain, steps) for writer in writers):
            chains[step.node] = chain
    values_by_reader: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value in chains:
        storages = steps.storages[value]
        nodes = [n for s in storages for n in steps.nodes_by_storage[s] if n in chains]
        if len({user for node in nodes for user in node.users if user not in chains}) > 1:
            for user in value.users:
                if user not in chains and user.op == "call_function":
                    values_by_reader[user].append(value)
    if not values_by_reader:
        return None
    return read_steps(_graph_with_copies(steps.graph, values_by_reader, chains), steps.effects)


def _chain(value: fx.Node, steps: Steps, from_live: bool) -> set[fx.Node]:
    """The operators that compute a value from small tensors; with `from_live` also from tensors
    that are live as long as the value. Empty if that takes a product, or too many operators."""
    value_bytes = nbytes(value)
    value_end = max((steps.last_use[s] for s in steps.storages[value]), default=0)

    def is_available(node: fx.Node) -> bool:
        if SMALL_RATIO * nbytes(node) <= value_bytes:
            return True
        ends = [steps.last_use.get(s, value_end) for s in steps.storages[node]]
        return from_live and all(end >= value_end for end in ends)

    chain, pending = set[fx.Node](), [value]
    while pending:
        node = pending.pop()
        if node in chain or (node is not value and is_available(node)):
            continue
        position = steps.position.get(node)
        chain.add(node)
        if position is None or steps.steps[position].flops or len(chain) > MAX_OPERATORS:
            return set()
        if rule_of(node.target) is None:
            return set()
        pending += node.all_input_nodes
    allocated = {s for node in chain for s in steps.steps[steps.position[node]].allocates}
    return chain if value_bytes and allocated.issuperset(steps.storages[value]) else set()


def _may_be_copied_with(writer: fx.Node, chain: set[fx.Node], steps: Steps) -> bool:
    """Whether an in-place operator writes only to values of the chain, or to none that it reads."""
    if writer in chain and chain.issuperset(written(writer)):
        return True
    nodes = {arg for node in chain for arg in (node, *node.all_input_nodes)}
    touched = {storage for node in nodes for storage in steps.storages[node]}
    return not touched & steps.written_storages[steps.position[writer]]


def _graph_with_copies(
    graph: fx.Graph,
    values_by_reader: Mapping[fx.Node, list[fx.Node]],
    chains: Mapping[fx.Node, set[fx.Node]],
) -> fx.Graph:
    """The graph with copies of the values' chains in front of each reader, and no unused chains."""
    new_graph, new_nodes = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()

    def append(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        return new_graph.node_copy(node, lambda n: copies.get(n) or new_nodes[n])

    for node in graph.nodes:
        values, copies = values_by_reader.get(node, ()), dict[fx.Node, fx.Node]()
        for operator in sorted({operator for value in values for operator in chains[value]}):
            copies[operator] = append(operator, copies)
        new_nodes[node] = append(node, {value: copies[value] for value in values})
    copied = {op for values in values_by_reader.values() for v in values for op in chains[v]}
    for node in sorted(copied, reverse=True):
        if not new_nodes[node].users:
            new_graph.erase_node(new_nodes[node])
    return new_graph
