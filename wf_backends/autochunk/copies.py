"""What is computed from little, such as a causal mask, computed anew for each of its readers.

A mask of all queries and keys that every layer reads lives through the whole pass, and no region
can slice it. A copy of its operators in front of each reader is sliced together with the reader.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from wf_backends.graph import Effects, Steps, read_steps, rule_of, tensors, writes

LITTLE = 16  # a value has so many times the bytes of what it is computed from


def with_copies(graph: fx.Graph, effects: Effects) -> fx.Graph | None:
    """The graph in which such a value is computed in front of each reader; None: it has none.

    It is computed without products from at most a `LITTLE`-th of its bytes, and read by two
    operators or more that are not.
    """
    steps = read_steps(graph, effects)
    origins = _origins(steps)
    reads = _reads(steps, {node for node, from_ in origins.items() if _is_little(node, from_)})
    if not reads:
        return None
    chains = {reader: _chain(graph, values, origins) for reader, values in reads.items()}
    if not all(_keep_to_themselves(chain, steps) for chain in chains.values()):
        return None
    made, copies = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        own = dict[fx.Node, fx.Node]()
        for part in chains.get(node, ()):
            own[part] = made.node_copy(part, lambda n, own=own: own.get(n) or copies[n])
        mine = {value: own[value] for value in reads.get(node, ())}
        copies[node] = made.node_copy(node, lambda n, mine=mine: mine.get(n) or copies[n])
    for node in reversed([part for chain in chains.values() for part in chain]):
        if node in copies and not copies[node].users:
            made.erase_node(copies.pop(node))
    return made


def _origins(steps: Steps) -> dict[fx.Node, frozenset[fx.Node]]:
    """Of each operator that computes no products: the values that it and those before it read,
    which are none of such an operator."""
    origins: dict[fx.Node, frozenset[fx.Node]] = {}
    for step in steps.steps:
        if not step.flops and rule_of(step.node.target) is not None:
            given = (origins.get(arg, frozenset((arg,))) for arg in step.node.all_input_nodes)
            origins[step.node] = frozenset().union(*given)
    return origins


def _is_little(node: fx.Node, origins: frozenset[fx.Node]) -> bool:
    return _bytes(node) > 0 and LITTLE * sum(map(_bytes, origins)) <= _bytes(node)


def _bytes(node: fx.Node) -> int:
    return sum(t.nbytes for t in tensors(node))


def _reads(steps: Steps, little: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Reader -> what it reads that is computed from little and lies in a storage that two read."""
    readers: dict[int, set[fx.Node]] = defaultdict(set)
    for value in little:
        for storage in steps.of[value]:
            readers[storage].update(user for user in value.users if user not in little)
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value in little:
        if any(len(readers[storage]) > 1 for storage in steps.of[value]):
            for user in value.users:
                if user not in little and user.op == "call_function":
                    found[user].append(value)
    return found


def _chain(
    graph: fx.Graph, values: list[fx.Node], origins: dict[fx.Node, frozenset[fx.Node]]
) -> list[fx.Node]:
    """The operators that compute these values, in the graph's order."""
    chain, left = set[fx.Node](), list(values)
    while left:
        node = left.pop()
        if node in origins and node not in chain:
            chain.add(node)
            left += node.all_input_nodes
    return [node for node in graph.nodes if node in chain]


def _keep_to_themselves(chain: list[fx.Node], steps: Steps) -> bool:
    """Whether what a chain writes in place is its own, and nobody else writes to it, or to what it
    reads."""
    seen = {arg for node in chain for arg in (node, *node.all_input_nodes)}
    storages = {storage for node in seen for storage in steps.of[node]}
    writers = {step.node for step in steps.steps if writes(step.node)}
    touching = {node for node in writers if storages.intersection(steps.of[node])}
    return all(node in chain and node.args[0] in chain for node in touching)
