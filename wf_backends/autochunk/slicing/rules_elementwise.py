"""Rules for elementwise operators, and for operators that combine elements along some dimensions
or take them apart, and can be sliced along all others: norms, reductions, sorting, splits, Fourier
transforms."""

from __future__ import annotations

from torch import fx

from wf_backends.autochunk.slicing.call import (
    Call,
    Reads,
    Rows,
    RowSlice,
    Rule,
    Table,
    aten,
    axis,
    broadcast,
    not_last,
    same_rows,
    same_rows_if,
    table,
)


def pointwise(call: Call, dim: int) -> Reads | None:
    """The same rows of every tensor, or the whole tensor where it is broadcast along `dim`."""
    if any(isinstance(value, list | tuple) for value in call.values.values()):
        return None
    return {name: broadcast(call.size(name), dim, call.shape) for name in call.tensors()}


def has_its_shape(call: Call, dim: int) -> bool:
    """Whether the output has the shape of the first tensor."""
    return call.size(next(iter(call.tensors()))) == call.shape


def is_identity(call: Call, dim: int) -> bool:
    """Whether a dropout draws no random numbers."""
    return not call["train"] or call["p"] == 0


def write_triangle(slice_: RowSlice) -> fx.Node:
    """Shifts the diagonal right by the number of rows before the slice, or left by the columns."""
    from_end = len(slice_.call.shape) - slice_.dim
    shift = {2: slice_.lo, 1: -slice_.lo}.get(from_end, 0)
    return slice_.call_same(diagonal=slice_.call["diagonal"] + shift)


def combined_dims(call: Call, ndim: int) -> set[int]:
    """The dimensions that the argument `dim` (or `dims`) names; all if it is None or empty."""
    dims = call.get("dim", call.get("dims"))
    if dims is None or dims == []:
        return set(range(ndim))
    return {axis(d, ndim) for d in (dims if isinstance(dims, list | tuple) else [dims])}


def along_other_dims(call: Call, dim: int) -> Reads | None:
    """The same rows of every tensor, along a dimension along which no elements are combined."""
    if dim in combined_dims(call, len(call.shape)):
        return None
    return {name: broadcast(call.size(name), dim, call.shape) for name in call.tensors()}


def reduction(call: Call, dim: int) -> Reads | None:
    """A remaining dimension; reduced dimensions, and one of which single rows are selected, are not
    in the output, or of size 1 (`keepdim`)."""
    if call.get("keepdim"):
        return {"self": Rows(dim)}
    ndim = len(call.size("self"))
    reduced = combined_dims(call, ndim)
    remaining = [d for d in range(ndim) if d not in reduced]
    return {"self": Rows(remaining[dim])}


def is_not_normalized(call: Call, dim: int) -> bool:
    return dim < len(call.shape) - len(call["normalized_shape"])


POINTWISE = Rule(pointwise)

TABLE: Table = {
    **table(  # elementwise operators without torch.Tag.pointwise
        POINTWISE,
        "__and__ __or__ __xor__ add copy divide expand_as fill floor_divide greater "
        "greater_equal hardswish isclose less less_equal log_sigmoid masked_fill multiply "
        "not_equal polar rsub sub subtract true_divide type_as where",
    ),
    **table(  # a second tensor only gives its dtype or a parameter
        same_rows_if(has_its_shape),
        "_to_copy alias clone contiguous detach empty_like full_like lift_fresh_copy ones_like to "
        "zero zeros_like",
    ),
    **table(same_rows_if(is_identity), "dropout feature_dropout alpha_dropout"),
    **table(Rule(same_rows, write_triangle), "tril triu"),
    **table(
        Rule(along_other_dims),
        "argsort chunk cummax cummin cumprod cumsum flip glu linalg_cross log_softmax "
        "_log_softmax logcumsumexp roll slice_scatter softmax _softmax sort split "
        "split_with_sizes tensor_split topk unsafe_chunk unsafe_split unsafe_split_with_sizes "
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 "
        "fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift",
    ),
    **table(
        Rule(reduction),
        "all amax amin any argmax argmin count_nonzero kthvalue linalg_norm linalg_vector_norm "
        "logsumexp max mean median min nansum norm prod select std std_mean sum unbind var "
        "var_mean",
    ),
    **table(same_rows_if(is_not_normalized), "layer_norm rms_norm"),
    # A wall where the number of classes depends on the values.
    aten.one_hot: same_rows_if(
        lambda call, dim: dim < len(call.shape) - 1 and call["num_classes"] >= 0
    ),
    aten.view_as_complex: Rule(same_rows),
    aten.view_as_real: not_last(1),  # the last one: real and imaginary part
}
