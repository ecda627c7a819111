"""Group norm in two passes, so that the second can be sliced along space (height, width, ...).

group_statistics: mean and rstd of each group, over its channels and all of space
group_normalize:  out = (x - mean) * rstd * weight + bias, elementwise
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from wf_backends.autochunk.slicing.call import Call, Reads, Rows, Rule, Table, aten, same_rows_if

_NORMS = (aten.group_norm.default, aten.instance_norm.default)
NUM_PARTS = 8  # in which statistics are computed: more are slower, and fewer take more memory


def group_statistics(x: Tensor, groups: int, eps: float) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of each group.

    Calls torch's kernel for a part of the groups at a time. The kernel also returns the normalized
    part, so that at most the bytes of one part are allocated beside `x`.

    Args:
        x: (batch, channels, space ...), any float dtype.

    Returns:
        (batch, groups, 2): mean and rstd, in float32, of a float64 `x` in float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    channels = x.shape[1] // groups  # of a group
    mean_rstd = []
    for part in x.split(-(-groups // NUM_PARTS) * channels, dim=1):
        sizes = len(x), part.shape[1], x[0, 0].numel(), part.shape[1] // channels
        dense = part.to(dtype).contiguous()
        mean_rstd.append(torch.native_group_norm(dense, None, None, *sizes, eps)[1:])
        del dense  # before the next part is copied
    return torch.stack([torch.cat(values, 1) for values in zip(*mean_rstd, strict=True)], -1)


def group_normalize(
    x: Tensor, statistics: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Normalizes `x` with the statistics of its groups, elementwise.

    Args:
        x: (batch, channels, space ...), or a slice of it along space.
        statistics: (batch, groups, 2), over the whole space.
        weight, bias: (channels,), or None.
    """
    mean, rstd = statistics.repeat_interleave(x.shape[1] // groups, 1).unbind(-1)
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    over_space = (..., *[None] * (x.ndim - 2))
    return torch.addcmul(shift[over_space], x.to(scale.dtype), scale[over_space]).to(x.dtype)


def split_group_norms(graph: fx.Graph) -> None:
    """Replaces every group norm whose dtype autocast does not change by the two functions above,
    and every instance norm, whose channels are groups, unless it has running statistics."""
    for node in [node for node in graph.nodes if node.target in _NORMS]:
        call = Call.from_node(node)
        has_running = not call.get("use_input_stats", True) or call.has("running_mean")
        if has_running or call["input"].meta["val"].dtype != node.meta["val"].dtype:
            continue
        x, parameters = call["input"], (call["weight"], call["bias"])
        groups = call.get("num_groups", call.shape[1])
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
    """Undoes `split_group_norms` wherever no region contains one of the two passes."""
    for node in graph.find_nodes(op="call_function", target=group_normalize):
        x, statistics, groups, weight, bias = node.args
        if not isinstance(statistics, fx.Node) or statistics.target is not group_statistics:
            continue
        with graph.inserting_before(node):
            eps = statistics.args[2]
            joined = graph.call_function(aten.group_norm.default, (x, groups, weight, bias, eps))
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        if not statistics.users:
            graph.erase_node(statistics)


def normalize_reads(call: Call, dim: int) -> Reads | None:
    """Sliced along the batch or space; the channels of a group share its statistics."""
    if dim == 1:
        return None
    return {"x": Rows(dim), "statistics": Rows(0) if dim == 0 else None}


ALONG_BATCH = same_rows_if(lambda _, dim: dim == 0)

TABLE: Table = {
    aten.group_norm: ALONG_BATCH,
    group_statistics: ALONG_BATCH,
    group_normalize: Rule(normalize_reads),
}
