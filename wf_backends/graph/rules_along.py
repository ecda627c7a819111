"""Rules for norms, reductions and others that work along some dimensions, not along the rest."""

from __future__ import annotations

from wf_backends.graph.call import Call, Reads, Rows, Rule, Table, aten, axis, broadcast


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


APART = (
    aten.argsort,
    aten.cummax,
    aten.cummin,
    aten.cumprod,
    aten.cumsum,
    aten.flip,
    aten.glu,
    aten.log_softmax,
    aten._log_softmax,
    aten.logcumsumexp,
    aten.roll,
    aten.softmax,
    aten._softmax,
    aten.sort,
    aten.topk,
)
REDUCTIONS = (
    aten.all,
    aten.amax,
    aten.amin,
    aten.any,
    aten.argmax,
    aten.argmin,
    aten.count_nonzero,
    aten.kthvalue,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.max,
    aten.mean,
    aten.median,
    aten.min,
    aten.nansum,
    aten.norm,
    aten.prod,
    aten.std,
    aten.std_mean,
    aten.sum,
    aten.var,
    aten.var_mean,
)

TABLE: Table = {
    **dict.fromkeys(APART, Rule(apart)),
    **dict.fromkeys(REDUCTIONS, Rule(reduction)),
    aten.layer_norm: Rule(norm),
    aten.linalg_cross: Rule(pair),
    aten.one_hot: Rule(one_hot),
    aten.rms_norm: Rule(norm),
    aten.slice_scatter: Rule(pair),
}
