"""Rules for operators that compute each element of the output from the elements at its place, and
for those that work along some dimensions, not along the rest: norms, reductions, sorting."""

from __future__ import annotations

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


def worked_along(call: Call, ndim: int) -> set[int]:
    """The dimensions named by the argument `dim` (or `dims`): one, several, or all."""
    named = call.get("dim", call.get("dims"))
    if named is None or named == []:
        return set(range(ndim))
    return {axis(d, ndim) for d in (named if isinstance(named, list | tuple) else [named])}


def apart(call: Call, dim: int) -> Reads | None:
    """The first tensor, along a dimension that the operator does not work along."""
    name = next(iter(call.tensors()))
    ndim = len(call.size(name))
    return None if dim in worked_along(call, ndim) else {name: Rows(dim)}


def reduction(call: Call, dim: int) -> Reads | None:
    """A dimension that is left over; the reduced ones are gone, or 1 with `keepdim`."""
    ndim = len(call.size("self"))
    reduced = worked_along(call, ndim)
    if call.get("keepdim"):
        return {"self": Rows(dim)}
    left_over = [d for d in range(ndim) if d not in reduced]
    return {"self": Rows(left_over[dim])}


def norm(call: Call, dim: int) -> Reads | None:
    """layer_norm and rms_norm: dimensions in front of the normalized ones."""
    return {"input": Rows(dim)} if dim < len(call.shape) - len(call["normalized_shape"]) else None


def pair(call: Call, dim: int) -> Reads | None:
    """Two tensors of the output's dimensions, along another one than they are joined along."""
    if dim in worked_along(call, len(call.shape)):
        return None
    return {name: broadcast(call.size(name), dim, call.shape) for name in call.tensors()}


def one_hot(call: Call, dim: int) -> Reads | None:
    known = call["num_classes"] >= 0 and dim < len(call.shape) - 1
    return {"self": Rows(dim)} if known else None


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
    **table(
        Rule(apart),
        "argsort cummax cummin cumprod cumsum flip glu log_softmax _log_softmax logcumsumexp "
        "roll softmax _softmax sort topk",
    ),
    **table(
        Rule(reduction),
        "all amax amin any argmax argmin count_nonzero kthvalue linalg_norm linalg_vector_norm "
        "logsumexp max mean median min nansum norm prod std std_mean sum var var_mean",
    ),
    **table(Rule(norm), "layer_norm rms_norm"),
    **table(Rule(pair), "linalg_cross slice_scatter"),
    aten.one_hot: Rule(one_hot),
}
