"""Rules for operators that join, cut or pick parts of tensors."""

from __future__ import annotations

import operator

import torch
from torch import fx

from wf_backends.slicing.call import (
    Call,
    Reads,
    Rows,
    Rule,
    Slice,
    Table,
    aten,
    axis,
    broadcast,
    same_rows,
    shape_of,
    table,
)


def own_axis(call: Call, name: str = "self") -> int:
    """The argument `dim` counted from the front, for the tensor `name`."""
    return axis(call["dim"], len(call.size(name)))


def cat(call: Call, dim: int) -> Reads | None:
    """Along another dimension; a wall with an empty vector among the tensors, as torch allows."""
    sizes = [shape_of(tensor) for tensor in call["tensors"]]
    same = all(size is not None and len(size) == len(call.shape) for size in sizes)
    along = axis(call["dim"], len(call.shape)) == dim
    return {"tensors": [Rows(dim)] * len(sizes)} if same and not along else None


def stack(call: Call, dim: int) -> Reads | None:
    new = axis(call["dim"], len(call.shape))
    return None if dim == new else {"tensors": [Rows(dim - (dim > new))] * len(call["tensors"])}


def split(call: Call, dim: int) -> Reads | None:
    """Each part, along another dimension than the cut."""
    return None if dim == own_axis(call) else {"self": Rows(dim)}


def pick(call: Call, dim: int) -> Reads:
    """select and unbind: dimension `call["dim"]` is gone from the output."""
    return {"self": Rows(dim + (dim >= own_axis(call)))}


def part(call: Call, dim: int) -> Reads | None:
    """slice and narrow: along the cut dimension the rows are `start` further on, in steps of 1."""
    if call.has("start"):  # known only when it runs
        return None
    if dim != own_axis(call):
        return {"self": Rows(dim)}
    size = call.size("self")[dim]
    start = min(max(axis(call["start"] or 0, size), 0), size)
    return {"self": Rows(dim, before=-start, after=start)} if call.get("step", 1) == 1 else None


def write_part(new: Slice) -> fx.Node:
    """Along the cut dimension the input holds just these rows: all of it is taken."""
    if new.dim != own_axis(new.call):
        return new.again()
    return new.put(aten.slice.Tensor, new.given["self"], new.dim, 0, new.hi - new.lo)


def gather(call: Call, dim: int) -> Reads:
    """The index is as large as the output; along `dim` all of `self` may be asked for."""
    return {"index": Rows(dim), "self": None if dim == own_axis(call) else Rows(dim)}


def scatter(call: Call, dim: int) -> Reads | None:
    """Along another dimension, of which the index has all rows."""
    names = call.tensors()
    same = len({call.size(name)[dim] for name in names}) == 1
    return dict.fromkeys(names, Rows(dim)) if same and dim != own_axis(call) else None


def index_select(call: Call, dim: int) -> Reads:
    return {"index": Rows(0)} if dim == own_axis(call) else {"self": Rows(dim)}


def index(call: Call, dim: int) -> Reads | None:
    """x[i, :, j]: the indices' own dimensions stand where i and j are adjacent, else in front."""
    ndim, indices = len(call.size("self")), list(call["indices"])
    indexed = [d for d, tensor in enumerate(indices) if tensor is not None]
    if not indexed or any(is_mask(indices[d]) for d in indexed):
        return None
    width = len(call.shape) - (ndim - len(indexed))
    adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
    first = indexed[0] if adjacent else 0
    if first <= dim < first + width:
        shape = call.shape[first : first + width]
        sizes = [shape_of(tensor) for tensor in indices]
        return {"indices": [broadcast(size, dim - first, shape) for size in sizes]}
    left_over = [d for d in range(ndim) if d not in indexed]
    return {"self": Rows(left_over[dim if dim < first else dim - width])}


def is_mask(tensor: fx.Node) -> bool:
    """Whether it is no tensor of indices: how many rows a mask picks is known only when it runs."""
    return tensor.meta["val"].dtype in (torch.bool, torch.uint8)


def embedding(call: Call, dim: int) -> Reads:
    return {"indices": Rows(dim)} if dim < len(call.size("indices")) else {"weight": Rows(1)}


def padding(call: Call, dim: int) -> tuple[int, int]:
    """Rows that are added before and after dimension `dim`; `pad` starts at the last dimension."""
    pad = call["pad"]
    place = 2 * (len(call.shape) - 1 - dim)
    return (pad[place], pad[place + 1]) if place < len(pad) else (0, 0)


def pad(call: Call, dim: int) -> Reads | None:
    """Along a padded dimension only constants are added slice by slice."""
    front, back = padding(call, dim)
    if (front or back) and call.get("mode", "constant") != "constant":
        return None
    return {"self": Rows(dim, before=front, after=-front)}


def write_pad(new: Slice) -> fx.Node:
    """This slice's share of the padding."""
    pad, place = list(new.call["pad"]), 2 * (len(new.call.shape) - 1 - new.dim)
    if place < len(pad):
        front, size = pad[place], new.call.size("self")[new.dim]
        missing = border(new.lo - front, new.hi - front, size)
        pad[place : place + 2] = missing
    return new.again(pad=pad)


def border(lo: int, hi: int, size: int) -> tuple[int, int]:
    """How many of rows [lo, hi) lie before and after a dimension of `size`."""
    before = min(max(-lo, 0), hi - lo)
    return before, min(max(hi - size, 0), hi - lo)


TABLE: Table = {
    **table(
        Rule(split),
        "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split "
        "unsafe_split_with_sizes",
    ),
    **table(Rule(cat), "cat concat"),
    **table(Rule(pad, write_pad), "constant_pad_nd pad"),
    **table(Rule(part, write_part), "narrow slice"),
    **table(Rule(pick), "select unbind"),
    aten.embedding: Rule(embedding),
    aten.gather: Rule(gather),
    aten.index: Rule(index),
    aten.index_select: Rule(index_select),
    aten.scatter: Rule(scatter),
    aten.scatter_add: Rule(scatter),
    aten.stack: Rule(stack),
    operator.getitem: Rule(same_rows),
}
