"""Rules for operators that move elements: they reshape, permute, expand, repeat, concatenate,
split, pad or index tensors, or fill new ones."""

from __future__ import annotations

import operator
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
    same_rows,
    shape_of,
    table,
)
from wf_backends.autochunk.slicing.rules_products import product


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


def write_with_size(slice_: RowSlice) -> fx.Node:
    return slice_.call_same(size=slice_.shape)


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


def operator_dim(call: Call) -> int:
    """The operator's argument `dim`, a dimension of `self`, counted from the front."""
    return axis(call["dim"], len(call.size("self")))


def cat(call: Call, dim: int) -> Reads | None:
    """Along another dimension; a wall if one of the tensors is an empty vector, as torch allows."""
    shapes = [shape_of(tensor) for tensor in call["tensors"]]
    same_ndim = all(shape is not None and len(shape) == len(call.shape) for shape in shapes)
    if not same_ndim or dim == axis(call["dim"], len(call.shape)):
        return None
    return {"tensors": [Rows(dim)] * len(shapes)}


def stack(call: Call, dim: int) -> Reads | None:
    new_dim = axis(call["dim"], len(call.shape))
    rows = Rows(dim if dim < new_dim else dim - 1)
    return None if dim == new_dim else {"tensors": [rows] * len(call["tensors"])}


def narrow(call: Call, dim: int) -> Reads | None:
    """slice and narrow: along the operator's dimension, row i of the output is row start + i."""
    if call.has("start"):  # its value is known only at run time
        return None
    if dim != operator_dim(call):
        return {"self": Rows(dim)}
    size = call.size("self")[dim]
    start = min(max(axis(call["start"] or 0, size), 0), size)
    return {"self": Rows(dim, before=-start, after=start)} if call.get("step", 1) == 1 else None


def write_narrow(slice_: RowSlice) -> fx.Node:
    """Along the operator's dimension the input of a slice has exactly its rows: takes all of it."""
    if slice_.dim != operator_dim(slice_.call):
        return slice_.call_same()
    return slice_.call_function(
        aten.slice.Tensor, slice_.arguments["self"], slice_.dim, 0, slice_.hi - slice_.lo
    )


def gather(call: Call, dim: int) -> Reads:
    """The index has the output's shape; along the operator's dimension it may name any row."""
    return {"index": Rows(dim), "self": None if dim == operator_dim(call) else Rows(dim)}


def scatter(call: Call, dim: int) -> Reads | None:
    """The same rows of all tensors, along another dimension, if they have the same size there."""
    names = call.tensors()
    same_size = len({call.size(name)[dim] for name in names}) == 1
    return dict.fromkeys(names, Rows(dim)) if same_size and dim != operator_dim(call) else None


def index_select(call: Call, dim: int) -> Reads:
    return {"index": Rows(0)} if dim == operator_dim(call) else {"self": Rows(dim)}


def index(call: Call, dim: int) -> Reads | None:
    """x[i, :, j]: the dimensions of the index tensors, broadcast to each other, replace the indexed
    ones if these are adjacent, and else stand in front."""
    ndim, indices = len(call.size("self")), list(call["indices"])
    indexed = [d for d, tensor in enumerate(indices) if tensor is not None]
    if not indexed or any(is_mask(indices[d]) for d in indexed):
        return None
    index_ndim = len(call.shape) - (ndim - len(indexed))
    adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
    first = indexed[0] if adjacent else 0
    if first <= dim < first + index_ndim:
        shape = call.shape[first : first + index_ndim]
        return {"indices": [broadcast(shape_of(i), dim - first, shape) for i in indices]}
    remaining = [d for d in range(ndim) if d not in indexed]
    return {"self": Rows(remaining[dim if dim < first else dim - index_ndim])}


def is_mask(tensor: fx.Node) -> bool:
    """Whether it is a mask instead of indices: how many rows it picks depends on its values."""
    return tensor.meta["val"].dtype in (torch.bool, torch.uint8)


def padding(call: Call, dim: int) -> tuple[int, int]:
    """The rows that are added before and after dimension `dim`; `pad` begins with the last one."""
    pad, position = call["pad"], 2 * (len(call.shape) - 1 - dim)
    return (pad[position], pad[position + 1]) if position < len(pad) else (0, 0)


def pad(call: Call, dim: int) -> Reads | None:
    """Along any dimension; along a padded one only where the padding is constant."""
    before, after = padding(call, dim)
    if (before or after) and call.get("mode", "constant") != "constant":
        return None
    return {"self": Rows(dim, before=before, after=-before)}


def write_pad(slice_: RowSlice) -> fx.Node:
    """Adds only the padding that lies in the slice."""
    pad, position = list(slice_.call["pad"]), 2 * (len(slice_.call.shape) - 1 - slice_.dim)
    if position < len(pad):
        before, size = pad[position], slice_.call.size("self")[slice_.dim]
        pad[position : position + 2] = outside(slice_.lo - before, slice_.hi - before, size)
    return slice_.call_same(pad=pad)


def outside(lo: int, hi: int, size: int) -> tuple[int, int]:
    """How many of rows [lo, hi) lie before row 0, and how many from row `size` on. If all do, the
    slice reads one row nevertheless, and -1 removes it."""
    if hi <= 0 or lo >= size:
        return hi - lo, -1
    return max(-lo, 0), max(hi - size, 0)


# Reads no rows: new_zeros and similar operators use only the dtype of `self`.
FILL = Rule(lambda call, dim: {}, write_with_size)

RESHAPES = table(
    Rule(reshape, write_reshape), "flatten reshape squeeze unflatten unsqueeze _unsafe_view view"
)
TABLE: Table = {
    **RESHAPES,
    **table(
        Rule(permute), "adjoint mT moveaxis movedim numpy_T permute swapaxes swapdims t transpose"
    ),
    **table(FILL, "empty full new_empty new_full new_ones new_zeros ones zeros"),
    **table(Rule(expand, write_with_size), "expand broadcast_to"),
    aten.repeat: Rule(repeat, write_repeat),
    aten.repeat_interleave: Rule(
        repeat_interleave, lambda slice_: slice_.call_same(output_size=None)
    ),
    **table(Rule(cat), "cat concat concatenate"),
    **table(Rule(pad, write_pad), "constant_pad_nd pad"),
    **table(Rule(narrow, write_narrow), "narrow slice"),
    aten.embedding: product("vd,...->...d", "weight", "indices"),
    aten.gather: Rule(gather),
    aten.index: Rule(index),
    aten.index_select: Rule(index_select),
    **table(Rule(scatter), "scatter scatter_add"),
    aten.stack: Rule(stack),
    operator.getitem: Rule(same_rows),
}
