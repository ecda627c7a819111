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

from wf_backends.graph.capture import nbytes
from wf_backends.graph.memory import Steps, read_steps
from wf_backends.slicing import rule_of, writes, written

Copied = Literal["", "masks", "norms"]  # none; what is computed from little; from what lives, too
LITTLE = 16  # a value has so many times the bytes of each of those that count as little
LONGEST = 32  # operators of a copy


def with_copies(steps: Steps, what: Copied) -> Steps | None:
    """The steps with a copy of each such value in front of each reader; None: there is none.

    They are computed without products, and read by two operators or more that are not copied.
    """
    writers = [step.node for step in steps.steps if writes(step.node)]
    chains: dict[fx.Node, set[fx.Node]] = {}
    for step in steps.steps:
        chain = _chain(step.node, steps, what == "norms")
        if chain and all(_is_its_own(writer, chain, steps) for writer in writers):
            chains[step.node] = chain
    reads: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value in chains:
        nodes = [node for s in steps.of[value] for node in steps.nodes[s] if node in chains]
        if len({user for node in nodes for user in node.users if user not in chains}) > 1:
            for user in value.users:
                if user not in chains and user.op == "call_function":
                    reads[user].append(value)
    return read_steps(_write(steps.graph, reads, chains), steps.effects) if reads else None


def _chain(value: fx.Node, steps: Steps, from_living: bool) -> set[fx.Node]:
    """The operators that compute a value from little, or from what lives as long as it does; none
    where that takes a product, or too many."""
    end = max((steps.last[s] for s in steps.of[value]), default=0)
    count = nbytes(value)

    def is_there(node: fx.Node) -> bool:
        if LITTLE * nbytes(node) <= count:
            return True
        return from_living and all(steps.last.get(s, end) >= end for s in steps.of[node])

    chain, left = set[fx.Node](), [value]
    while left:
        node = left.pop()
        if node in chain or (node is not value and is_there(node)):
            continue
        place = steps.position.get(node)
        chain.add(node)
        if place is None or steps.steps[place].flops or len(chain) > LONGEST:
            return set()
        if rule_of(node.target) is None:
            return set()
        left += node.all_input_nodes
    made = {s for node in chain for s in steps.steps[steps.position[node]].allocates}
    return chain if count and made.issuperset(steps.of[value]) else set()


def _is_its_own(writer: fx.Node, chain: set[fx.Node], steps: Steps) -> bool:
    """Whether what an operator writes to is the chain's own, or nothing that it touches."""
    if writer in chain and chain.issuperset(written(writer)):
        return True
    seen = {arg for node in chain for arg in (node, *node.all_input_nodes)}
    return (
        not {storage for node in seen for storage in steps.of[node]}
        & steps.written[steps.position[writer]]
    )


def _write(
    graph: fx.Graph, reads: dict[fx.Node, list[fx.Node]], chains: dict[fx.Node, set[fx.Node]]
) -> fx.Graph:
    """The graph with a copy of all that a reader reads in front of it."""
    made, copies = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()

    def put(node: fx.Node, own: dict[fx.Node, fx.Node]) -> fx.Node:
        return made.node_copy(node, lambda n: own.get(n) or copies[n])

    for node in graph.nodes:
        own = dict[fx.Node, fx.Node]()
        for part in sorted({part for value in reads.get(node, ()) for part in chains[value]}):
            own[part] = put(part, own)
        copies[node] = put(node, {value: own[value] for value in reads.get(node, ())})
    copied = {part for values in reads.values() for value in values for part in chains[value]}
    for node in sorted(copied, reverse=True):
        if not copies[node].users:
            made.erase_node(copies[node])
    return made
