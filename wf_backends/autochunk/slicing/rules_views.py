"""Rules for operators that reshape, permute, expand or repeat a tensor, or fill a new one."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import torch
from torch import fx

from wf_backends.autochunk.slicing.call import (
    Call,
    Reads,
    Rows,
    RowSlice,
    Rule,
    Shape,
    Table,
    aten,
    axis,
    broadcast,
    table,
)


def dimension_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of input dimensions that a reshape maps to output dimensions.

    (2, 8, 4, 3) -> (16, 12): [0, 1] -> [0] and [2, 3] -> [1]. Dimensions of size 1 are in no group.
    Within a group, rows of the outermost dimension of either side are contiguous elements.
    """
    old, new = (deque(d for d, n in enumerate(sizes) if n != 1) for sizes in (before, after))
    groups = []
    while old and new:
        ins, outs = [old.popleft()], [new.popleft()]
        in_elements, out_elements = before[ins[0]], after[outs[0]]
        while in_elements != out_elements:
            if in_elements < out_elements:
                ins.append(old.popleft())
                in_elements *= before[ins[-1]]
            else:
                outs.append(new.popleft())
                out_elements *= after[outs[-1]]
        groups.append((ins, outs))
    return groups


def reshape(call: Call, dim: int) -> Reads | None:
    """The outermost dimension of a group alone; a wall if the dtype changes."""
    size = call.size("self")
    if 0 in size or call.get("dtype") is not None:
        return None
    for ins, outs in dimension_groups(size, call.shape):
        if outs[0] == dim:
            return {"self": Rows(ins[0], Fraction(size[ins[0]], call.shape[dim]))}
    return None


def write_reshape(slice_: RowSlice) -> fx.Node:
    """Calls `reshape` instead of `view`: a slice may have strides of which no view is possible."""
    return slice_.call_function(aten.reshape.default, slice_.arguments["self"], slice_.shape)


def permute(call: Call, dim: int) -> Reads:
    """The order is the sizes of a permuted meta tensor whose dimension n has size n."""
    numbered = torch.empty(tuple(range(len(call.shape))), device="meta")
    order = call.target(**{**call.values, "self": numbered}).shape
    return {"self": Rows(order[dim])}


def expand(call: Call, dim: int) -> Reads:
    return {"self": broadcast(call.size("self"), dim, call.shape)}


def write_expand(slice_: RowSlice) -> fx.Node:
    return slice_.call_function(aten.expand.default, slice_.arguments["self"], slice_.shape)


def repeat(call: Call, dim: int) -> Reads | None:
    """A dimension that is not repeated, or of which the input has one row."""
    input_dim = dim - len(call.shape) + len(call.size("self"))
    if input_dim < 0 or call.size("self")[input_dim] == 1:
        return {}
    return {"self": Rows(input_dim)} if call["repeats"][dim] == 1 else None


def write_repeat(slice_: RowSlice) -> fx.Node:
    repeats = list(slice_.call["repeats"])
    if repeats[slice_.dim] > 1:
        repeats[slice_.dim] = slice_.hi - slice_.lo
    return slice_.call_same(repeats=repeats)


def repeat_interleave(call: Call, dim: int) -> Reads | None:
    """Along the operator's dimension a row becomes `repeats` rows. A wall if `repeats` is a tensor,
    or if the input is flattened (`dim` is None)."""
    if not isinstance(call.get("repeats"), int):
        return None
    ndim = len(call.size("self"))
    if call["dim"] is None and ndim > 1:
        return None
    repeats = call["repeats"] if dim == axis(call["dim"] or 0, ndim) else 1
    return {"self": Rows(dim, Fraction(1, repeats))}


# Reads no rows: new_zeros and similar operators use only the dtype of `self`.
FILL = Rule(lambda call, dim: {}, lambda slice_: slice_.call_same(size=slice_.shape))

RESHAPES = table(
    Rule(reshape, write_reshape), "flatten reshape squeeze unflatten unsqueeze _unsafe_view view"
)
TABLE: Table = {
    **RESHAPES,
    **table(
        Rule(permute), "adjoint mT moveaxis movedim numpy_T permute swapaxes swapdims t transpose"
    ),
    **table(FILL, "empty full new_empty new_full new_ones new_zeros ones zeros"),
    **table(Rule(expand, write_expand), "expand broadcast_to"),
    aten.repeat: Rule(repeat, write_repeat),
    aten.repeat_interleave: Rule(
        repeat_interleave, lambda slice_: slice_.call_same(output_size=None)
    ),
}
