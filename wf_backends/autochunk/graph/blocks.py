"""Blocks of a forward under ``torch.autocast``, which torch.export gives as one operator each.

Such an operator is a wall. Where a block leaves autocast as it is outside, its operators stand in
the graph instead. Many models have such blocks, "in float32": ``torch.autocast(enabled=False)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

_BLOCK = torch.ops.higher_order.wrap_with_autocast


def submodule(node: fx.Node) -> nn.Module:
    """The module that a `get_attr` node names, such as the body of a higher-order operator."""
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))


def inline_blocks(graph: fx.Graph) -> None:
    """Put the operators of all blocks that do not change autocast's state, which is that of the
    trace, in place of the blocks."""
    while idle := [node for node in graph.nodes if node.target is _BLOCK and _is_idle(node)]:
        for node in idle:  # in which there may be others
            _inline(graph, node)


def _is_idle(block: Any) -> bool:
    device, dtype, enabled, *_ = block.args
    if enabled != torch.is_autocast_enabled(device):
        return False
    return not enabled or dtype == torch.get_autocast_dtype(device)


def _inline(graph: Any, block: Any) -> None:
    name, operands = block.args[4], block.args[5:]
    body: Any = submodule(name).graph
    copies: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(block):
        for node in body.nodes:
            if node.op == "get_attr":  # the body of a block inside
                path = f"{name.target}_{node.target}".replace(".", "_")
                graph.owning_module.add_submodule(path, submodule(node))
                copies[node] = graph.get_attr(path)
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
    (outputs,) = body.output_node().args
    for user in list(block.users):  # getitem
        user.replace_all_uses_with(copies[outputs[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(block)
