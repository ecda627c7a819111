"""Rules for operators that compute each element of the output from the elements at its place."""

from __future__ import annotations

from torch import fx

from wf_backends.slicing.call import (
    Call,
    Reads,
    Rows,
    Rule,
    Slice,
    Table,
    broadcast,
    same_rows,
    table,
)


def pointwise(call: Call, dim: int) -> Reads | None:
    """Every tensor is read at the same rows, or whole where it is broadcast along `dim`."""
    if any(isinstance(value, list | tuple) for value in call.values.values()):
        return None
    return {name: broadcast(call.size(name), dim, call.shape) for name in call.tensors()}


def unary(call: Call, dim: int) -> Reads | None:
    """Only the first tensor is sliced; a second one gives its dtype or a parameter."""
    name = next(iter(call.tensors()))
    return same_rows(call, dim) if call.size(name) == call.shape else None


def dropout(call: Call, dim: int) -> Reads | None:
    """The identity; a wall where it draws random numbers."""
    return None if call["train"] and call["p"] > 0 else {"input": Rows(dim)}


def write_triangle(new: Slice) -> fx.Node:
    """Row lo of a triangle is row 0 of one whose diagonal lies lo further right; columns: left."""
    from_end = len(new.call.shape) - new.dim
    shift = {2: new.lo, 1: -new.lo}.get(from_end, 0)
    return new.again(diagonal=new.call["diagonal"] + shift)


POINTWISE = Rule(pointwise)

TABLE: Table = {
    **table(  # what torch.Tag.pointwise misses
        POINTWISE,
        "__and__ __or__ __xor__ add copy divide expand_as fill floor_divide greater "
        "greater_equal hardswish isclose less less_equal log_sigmoid masked_fill multiply "
        "not_equal polar rsub sub subtract true_divide type_as where",
    ),
    **table(
        Rule(unary),
        "_to_copy alias clone contiguous detach full_like lift_fresh_copy ones_like to "
        "zero zeros_like",
    ),
    **table(Rule(dropout), "dropout feature_dropout alpha_dropout"),
    **table(Rule(same_rows, write_triangle), "tril triu"),
}
