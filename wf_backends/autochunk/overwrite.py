"""The input of a region whose memory the region's end may take: a residual stream, overwritten row
by row, so that it does not live twice.

Every slice reads the input's rows that it overwrites afterwards, and no others; nobody reads them
later. An input of the model is its caller's, and is never taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from wf_backends.graph import Steps, layout, nbytes
from wf_backends.slicing import Flow, viewed


def input_to_overwrite(
    graph: Steps, flow: Flow, hi: int, after: Iterable[fx.Node]
) -> fx.Node | None:
    """The input that the end of a flow may overwrite, if there is one.

    `hi` is the last step of the flow's window, `after` the nodes of the window that run behind the
    region.
    """
    end = flow.end.node
    for node in dict.fromkeys(node for node, _ in flow.inputs):
        if layout(node.meta["val"]) != layout(end.meta["val"]) or node not in graph.position:
            continue
        (storage,) = graph.of[node]
        read_after = any(storage in graph.of[arg] for n in after for arg in n.all_input_nodes)
        if (
            graph.size.get(storage) == nbytes(end)
            and graph.last[storage] <= hi
            and not read_after
            and _has_no_copies(graph, storage, flow)
            and _reads_own_rows(graph, storage, flow, node)
        ):
            return node
    return None


def _has_no_copies(graph: Steps, storage: int, flow: Flow) -> bool:
    """Whether no other storage may turn out to be this one: a reshape may copy, or give a view,
    and the outputs of regions lie otherwise in memory than their nodes say."""
    nodes = graph.nodes[storage]
    users = {user for node in nodes for user in node.users} - flow.members
    return viewed(nodes[0]) is None and all(
        viewed(user) is None or storage in graph.of[user] for user in users
    )


def _reads_own_rows(graph: Steps, storage: int, flow: Flow, node: fx.Node) -> bool:
    """Whether a slice reads of the node's memory just the rows that it computes of the end."""
    end = flow.end
    return all(
        source.node is node
        and source.dim == end.dim
        and all(source.rows(*rows[op.value]) == rows[end.value] for rows in flow.halves)
        for op in flow.operators
        for source in op.sources
        if source.node not in flow.members and storage in graph.of[source.node]
    )
