"""Rules for operators that give the same elements other dimensions, or repeat one element."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import torch
from torch import fx

from wf_backends.slicing.call import (
    Call,
    Reads,
    Rows,
    Rule,
    Shape,
    Slice,
    Table,
    aten,
    axis,
    broadcast,
    table,
)


def dimension_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions that a reshape keeps apart; sizes of 1 belong to none.

    (2, 8, 4, 3) -> (16, 12): [0, 1] -> [0] and [2, 3] -> [1]. Within a group, rows of the outermost
    dimension of either side are one run of memory.
    """
    old, new = (deque(d for d, n in enumerate(sizes) if n != 1) for sizes in (before, after))
    groups = []
    while old and new:
        ins, outs = [old.popleft()], [new.popleft()]
        held, wanted = before[ins[0]], after[outs[0]]
        while held != wanted:
            if held < wanted:
                ins.append(old.popleft())
                held *= before[ins[-1]]
            else:
                outs.append(new.popleft())
                wanted *= after[outs[-1]]
        groups.append((ins, outs))
    return groups


def reshape(call: Call, dim: int) -> Reads | None:
    """Only the outermost dimension of its group, and only if the elements keep their dtype."""
    size = call.size("self")
    if 0 in size or call.get("dtype") is not None:
        return None
    for ins, outs in dimension_groups(size, call.shape):
        if outs[0] == dim:
            return {"self": Rows(ins[0], Fraction(size[ins[0]], call.shape[dim]))}
    return None


def write_reshape(new: Slice) -> fx.Node:
    """`reshape` and not `view`: a slice may lie otherwise in memory than the whole."""
    return new.put(aten.reshape.default, new.given["self"], new.shape)


def permute(call: Call, dim: int) -> Reads:
    """Where each dimension comes from is read off a tensor whose size n is that of dimension n."""
    numbered = torch.empty(tuple(range(len(call.shape))), device="meta")
    order = call.target(**{**call.values, "self": numbered}).shape
    return {"self": Rows(order[dim])}


def expand(call: Call, dim: int) -> Reads:
    return {"self": broadcast(call.size("self"), dim, call.shape)}


def write_expand(new: Slice) -> fx.Node:
    return new.put(aten.expand.default, new.given["self"], new.shape)


def filled(call: Call, dim: int) -> Reads:
    """Made from its sizes alone; `self` of new_zeros and its like gives only the dtype."""
    return {}


def write_size(new: Slice) -> fx.Node:
    return new.again(size=new.shape)


def repeat(call: Call, dim: int) -> Reads | None:
    """Along dimensions that are not repeated, or of size 1."""
    own = dim - len(call.shape) + len(call.size("self"))
    if own < 0 or call.size("self")[own] == 1:
        return {}
    return {"self": Rows(own)} if call["repeats"][dim] == 1 else None


def write_repeat(new: Slice) -> fx.Node:
    repeats = list(new.call["repeats"])
    if repeats[new.dim] > 1:
        repeats[new.dim] = new.hi - new.lo
    return new.again(repeats=repeats)


def repeat_interleave(call: Call, dim: int) -> Reads | None:
    """Along the repeated dimension a row gives `repeats` rows; without `dim` only of a vector."""
    if not isinstance(call.get("repeats"), int):
        return None
    size = call.size("self")
    if call["dim"] is None and len(size) > 1:
        return None
    along = axis(call["dim"] or 0, len(size)) == dim
    return {"self": Rows(dim, Fraction(1, call["repeats"]) if along else Fraction(1))}


def write_repeat_interleave(new: Slice) -> fx.Node:
    return new.again(output_size=None)


RESHAPES = table(
    Rule(reshape, write_reshape), "flatten reshape squeeze unflatten unsqueeze _unsafe_view view"
)
TABLE: Table = {
    **RESHAPES,
    **table(
        Rule(permute),
        "adjoint mT moveaxis movedim numpy_T permute swapaxes swapdims t transpose",
    ),
    **table(
        Rule(filled, write_size),
        "empty full new_empty new_full new_ones new_zeros ones zeros",
    ),
    **table(Rule(expand, write_expand), "expand broadcast_to"),
    aten.repeat: Rule(repeat, write_repeat),
    aten.repeat_interleave: Rule(repeat_interleave, write_repeat_interleave),
}
