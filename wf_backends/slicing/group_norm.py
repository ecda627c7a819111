"""Group norm in two passes, so that the second can run slice by slice of space.

mean, rstd = of each group, over its channels and all of space
out = (x - mean) * rstd * weight + bias, at each place apart
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from wf_backends.slicing.call import Call, Reads, Rows, Rule, Table, aten


def group_statistics(x: Tensor, groups: int, eps: float) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of each group.

    Torch's own kernel, one group at a time: it also writes the normalized group, and so only that
    much memory is needed beside `x`.

    Args:
        x: (batch, channels, space ...), any float dtype.

    Returns:
        (batch, groups, 2): mean and rstd, in float32, of a float64 `x` in float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    batch, channels = len(x), x.shape[1] // groups
    places = x[0, 0].numel()
    sizes = (batch, channels, places, 1, eps)
    found = [
        torch.native_group_norm(part.to(dtype).contiguous(), None, None, *sizes)[1:]
        for part in x.chunk(groups, dim=1)
    ]
    return torch.stack([torch.cat(of_groups, 1) for of_groups in zip(*found, strict=True)], -1)


def group_normalize(
    x: Tensor, statistics: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Normalizes `x` with its groups' statistics; every place of space apart.

    Args:
        x: (batch, channels, space ...), or a slice of its space.
        statistics: (batch, groups, 2), of the whole space.
        weight, bias: (channels,), or None.
    """
    mean, rstd = statistics.repeat_interleave(x.shape[1] // groups, 1).unbind(-1)
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    places = (..., *[None] * (x.ndim - 2))
    return torch.addcmul(shift[places], x.to(scale.dtype), scale[places]).to(x.dtype)


def split_group_norms(graph: fx.Graph) -> None:
    """Replaces every group norm by the two functions above, but one that autocast widens."""
    for node in graph.find_nodes(op="call_function", target=aten.group_norm.default):
        call = Call.of(node)
        if call["input"].meta["val"].dtype != node.meta["val"].dtype:
            continue
        x, groups, parameters = call["input"], call["num_groups"], (call["weight"], call["bias"])
        with graph.inserting_before(node):
            statistics = graph.call_function(group_statistics, (x, groups, call["eps"]))
            normalize = graph.call_function(group_normalize, (x, statistics, groups, *parameters))
        value = x.meta["val"]
        dtype = torch.promote_types(value.dtype, torch.float32)
        statistics.meta = {**node.meta, "val": value.new_empty(len(value), groups, 2, dtype=dtype)}
        normalize.meta = dict(node.meta)
        node.replace_all_uses_with(normalize)
        graph.erase_node(node)


def join_group_norms(graph: fx.Graph) -> None:
    """Undoes `split_group_norms` where both passes are still there: what is not chunked runs
    torch's own kernel."""
    for node in graph.find_nodes(op="call_function", target=group_normalize):
        x, statistics, groups, weight, bias = node.args
        if not isinstance(statistics, fx.Node) or statistics.target is not group_statistics:
            continue
        with graph.inserting_before(node):
            eps = statistics.args[2]
            whole = graph.call_function(aten.group_norm.default, (x, groups, weight, bias, eps))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        if not statistics.users:
            graph.erase_node(statistics)


def by_batch(call: Call, dim: int) -> Reads | None:
    return {"x": Rows(0)} if dim == 0 else None


def normalize(call: Call, dim: int) -> Reads | None:
    """By batch or by space; the channels of a group share their statistics."""
    if dim == 1:
        return None
    return {"x": Rows(dim), "statistics": Rows(0) if dim == 0 else None}


TABLE: Table = {group_statistics: Rule(by_batch), group_normalize: Rule(normalize)}
