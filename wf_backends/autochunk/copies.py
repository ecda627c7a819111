"""Values that are computed anew for each of their readers, so that they are sliced with the reader.

A mask of all queries and keys that every layer reads lives through the whole pass, and no region
can slice it: it is computed from little, and so are copies of it. A normed input that several
linears read lives beside the input itself: a copy in front of each reader is computed from what
lives anyway.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from torch import fx

from wf_backends.graph import Effects, Step, Steps, read_steps, rule_of, tensors, writes

Copied = Literal["", "masks", "norms"]  # none; what is computed from little; from what lives, too
LITTLE = 16  # a value has so many times the bytes of each of those that count as little
LONGEST = 32  # operators of a copy


def with_copies(graph: fx.Graph, effects: Effects, what: Copied) -> fx.Graph | None:
    """The graph in which such values are computed in front of each reader; None: it has none.

    They are computed without products, and read by two operators or more that are not copied.
    """
    steps = read_steps(graph, effects)
    by_node = {step.node: step for step in steps.steps}
    writers = [node for node in by_node if writes(node)]
    chains: dict[fx.Node, set[fx.Node]] = {}
    for node in by_node:
        chain = _chain(node, steps, by_node, what == "norms")
        if chain is not None and _keep_to_themselves(chain, steps, writers):
            chains[node] = chain
    reads = _reads(steps, chains)
    return _write(graph, reads, chains) if reads else None


def _chain(
    value: fx.Node, steps: Steps, by_node: dict[fx.Node, Step], from_living: bool
) -> set[fx.Node] | None:
    """The operators that compute a value from little, or from what lives as long as it does."""
    end = max((steps.last[s] for s in steps.of[value]), default=0)

    def is_there(node: fx.Node) -> bool:
        if LITTLE * _bytes(node) <= _bytes(value):
            return True
        return from_living and all(steps.last.get(s, end) >= end for s in steps.of[node])

    chain, left = set[fx.Node](), [value]
    while left:
        node = left.pop()
        if node in chain or (node is not value and is_there(node)):
            continue
        chain.add(node)
        step = by_node.get(node)
        if step is None or step.flops or len(chain) > LONGEST or rule_of(node.target) is None:
            return None
        left += node.all_input_nodes
    made = {s for node in chain for s, _ in by_node[node].allocates}
    return chain if made.issuperset(steps.of[value]) and _bytes(value) else None


def _bytes(node: fx.Node) -> int:
    return sum(t.nbytes for t in tensors(node))


def _keep_to_themselves(chain: set[fx.Node], steps: Steps, writers: list[fx.Node]) -> bool:
    """Whether what a chain writes in place is its own, and nobody else writes to it, or to what it
    reads."""
    seen = {arg for node in chain for arg in (node, *node.all_input_nodes)}
    storages = {storage for node in seen for storage in steps.of[node]}
    touching = [node for node in writers if storages.intersection(steps.of[node])]
    return all(node in chain and node.args[0] in chain for node in touching)


def _reads(steps: Steps, chains: dict[fx.Node, set[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """Reader -> what it reads that is to be copied: what lies in a storage that two read."""
    readers: dict[int, set[fx.Node]] = defaultdict(set)
    for value in chains:
        for storage in steps.of[value]:
            readers[storage].update(user for user in value.users if user not in chains)
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value in chains:
        if any(len(readers[storage]) > 1 for storage in steps.of[value]):
            for user in value.users:
                if user not in chains and user.op == "call_function":
                    found[user].append(value)
    return found


def _write(
    graph: fx.Graph, reads: dict[fx.Node, list[fx.Node]], chains: dict[fx.Node, set[fx.Node]]
) -> fx.Graph:
    """The graph with a copy of all that a reader reads in front of it."""
    made, copies = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    nodes = list(graph.nodes)
    for node in nodes:
        own = dict[fx.Node, fx.Node]()
        needed = {part for value in reads.get(node, ()) for part in chains[value]}
        for part in sorted(needed):
            own[part] = made.node_copy(part, lambda n, own=own: own.get(n) or copies[n])
        mine = {value: own[value] for value in reads.get(node, ())}
        copies[node] = made.node_copy(node, lambda n, mine=mine: mine.get(n) or copies[n])
    copied = {part for values in reads.values() for value in values for part in chains[value]}
    for node in reversed(nodes):
        if node in copied and not copies[node].users:
            made.erase_node(copies[node])
    return made
