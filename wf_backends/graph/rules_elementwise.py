"""Rules for operators that compute each element of the output from the elements at its place."""

from __future__ import annotations

from torch import fx

from wf_backends.graph.call import Call, Reads, Rows, Rule, Slice, Table, aten, broadcast


def pointwise(call: Call, dim: int) -> Reads | None:
    """Every tensor is read at the same rows, or whole where it is broadcast along `dim`."""
    if any(isinstance(value, list | tuple) for value in call.values.values()):
        return None
    return {name: broadcast(call.size(name), dim, call.shape) for name in call.tensors()}


def unary(call: Call, dim: int) -> Reads | None:
    """Only the first tensor is sliced; a second one gives its dtype or a parameter."""
    name = next(iter(call.tensors()))
    return {name: Rows(dim)} if call.size(name) == call.shape else None


def dropout(call: Call, dim: int) -> Reads | None:
    """The identity; a wall where it draws random numbers."""
    return None if call["train"] and call["p"] > 0 else {"input": Rows(dim)}


def triangle(call: Call, dim: int) -> Reads:
    return {"self": Rows(dim)}


def write_triangle(new: Slice) -> fx.Node:
    """Row lo of a triangle is row 0 of one whose diagonal lies lo further right; columns: left."""
    from_end = len(new.call.shape) - new.dim
    shift = {2: new.lo, 1: -new.lo}.get(from_end, 0)
    return new.again(diagonal=new.call["diagonal"] + shift)


POINTWISE = Rule(pointwise)
UNARY = Rule(unary)

# What torch.Tag.pointwise misses. A packet stands for its in-place twin too.
POINTWISE_UNTAGGED = (
    aten.__and__,
    aten.__or__,
    aten.__xor__,
    aten.add,
    aten.copy,
    aten.divide,
    aten.expand_as,
    aten.fill,
    aten.floor_divide,
    aten.greater,
    aten.greater_equal,
    aten.hardswish,
    aten.isclose,
    aten.less,
    aten.less_equal,
    aten.log_sigmoid,
    aten.masked_fill,
    aten.multiply,
    aten.not_equal,
    aten.polar,
    aten.rsub,
    aten.sub,
    aten.subtract,
    aten.true_divide,
    aten.where,
)

UNARY_LIKE = (
    aten._to_copy,
    aten.alias,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.full_like,
    aten.lift_fresh_copy,
    aten.ones_like,
    aten.to,
    aten.type_as,
    aten.zero,
    aten.zeros_like,
)

TABLE: Table = {
    **dict.fromkeys(POINTWISE_UNTAGGED, POINTWISE),
    **dict.fromkeys(UNARY_LIKE, UNARY),
    aten.dropout: Rule(dropout),
    aten.feature_dropout: Rule(dropout),
    aten.alpha_dropout: Rule(dropout),
    aten.tril: Rule(triangle, write_triangle),
    aten.triu: Rule(triangle, write_triangle),
}
