"""Rules for convolutions, pooling, resizing and norms of images: (batch, channels, space ...).

A slice along a dimension of space (depth, height, width) also reads a halo: the rows beyond it that
its first and its last window reach. Where these lie outside the input, the slice is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from torch import fx

from wf_backends.autochunk.slicing.call import (
    Call,
    Reads,
    Rows,
    RowSlice,
    Rule,
    Table,
    aten,
    same_rows,
    table,
)
from wf_backends.autochunk.slicing.rules_select import outside


def windows_of(
    call: Call, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> list[Rows]:
    """For each dimension of space, the input rows that the windows of a slice along it cover.

    `stride`, `padding` and `dilation` have a number for each of these dimensions, or one for all.
    """
    num_dims = len(kernel)
    dims = range(len(call.shape) - num_dims, len(call.shape))
    steps, pads, gaps = (_per_dimension(value, num_dims) for value in (stride, padding, dilation))
    return [
        Rows(dim, Fraction(step), before=pad, after=gap * (size - 1) + 1 - step - pad)
        for dim, size, step, pad, gap in zip(dims, kernel, steps, pads, gaps, strict=True)
    ]


def _per_dimension(value: Any, num_dims: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * num_dims if len(values) == 1 else values


def conv_windows(call: Call) -> list[Rows] | None:
    """The windows of a convolution; None where padding "same" pads two sides differently."""
    kernel, padding = call.size("weight")[2:], call["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        dilation = _per_dimension(call["dilation"], len(kernel))
        total = [d * (size - 1) for d, size in zip(dilation, kernel, strict=True)]
        if any(rows % 2 for rows in total):
            return None
        padding = [rows // 2 for rows in total]
    return windows_of(call, kernel, call["stride"], padding, call["dilation"])


def pool_windows(call: Call, num_dims: int) -> list[Rows] | None:
    """The windows of a pooling operator; None for integers, or if border windows are incomplete."""
    padded = any(_per_dimension(call["padding"], num_dims))
    if (
        call["ceil_mode"]
        or not call["self"].meta["val"].is_floating_point()
        or (padded and not call.get("count_include_pad", True))
    ):
        return None
    kernel = _per_dimension(call["kernel_size"], num_dims)
    return windows_of(
        call, kernel, call["stride"] or kernel, call["padding"], call.get("dilation", 1)
    )


def padded_arguments(
    slice_: RowSlice, name: str, windows: list[Rows], fill: float
) -> dict[str, Any]:
    """The arguments that a slice along space changes: `padding`, and the input `name`, which is
    padded with `fill` first if the slice needs more padding on one side than on the other."""
    from_end = len(slice_.call.shape) - slice_.dim
    rows = windows[-from_end].unclipped(slice_.lo, slice_.hi)
    before, after = outside(*rows, slice_.call.size(name)[slice_.dim])
    tensor = slice_.arguments[name]
    padding = [window.before for window in windows]
    if before == after:
        padding[-from_end] = before
    else:
        padding[-from_end] = 0
        pad = [0, 0] * (from_end - 1) + [before, after]
        tensor = slice_.call_function(aten.constant_pad_nd.default, tensor, pad, fill)
    return {name: tensor, "padding": padding}


def is_space(call: Call, dim: int, num_dims: int) -> bool:
    return dim >= len(call.shape) - num_dims


def convolution(call: Call, dim: int) -> Reads | None:
    """Sliced along the batch, space, or output channels (if each reads all input channels)."""
    num_space_dims = len(call.size("weight")) - 2
    channel_dim = len(call.shape) - num_space_dims - 1
    if dim < channel_dim:
        return {"input": Rows(dim)}
    if call.get("transposed"):
        return None
    if dim == channel_dim:
        return {"weight": Rows(0), "bias": Rows(0)} if call["groups"] == 1 else None
    windows = conv_windows(call)
    return None if windows is None else {"input": windows[dim - len(call.shape)]}


def write_convolution(slice_: RowSlice) -> fx.Node:
    if not is_space(slice_.call, slice_.dim, len(slice_.call.size("weight")) - 2):
        return slice_.call_same()
    windows = conv_windows(slice_.call)
    assert windows is not None
    changed = padded_arguments(slice_, "input", windows, 0.0)
    overload = slice_.call.target.overloadpacket.default  # takes numbers as padding, not "same"
    return slice_.call_function(overload, **{**slice_.arguments, **changed})


def transposed_convolution(call: Call, dim: int) -> Reads | None:
    """Sliced along the batch, where the input has one."""
    return {"input": Rows(0)} if dim == 0 and len(call.shape) == len(call.size("weight")) else None


def pool(num_dims: int, fill: float) -> Rule:
    """The rule for a pooling operator over `num_dims` dimensions of space, padded with `fill`."""

    def reads(call: Call, dim: int) -> Reads | None:
        if not is_space(call, dim, num_dims):
            return {"self": Rows(dim)}
        windows = pool_windows(call, num_dims)
        return None if windows is None else {"self": windows[dim - len(call.shape)]}

    def write(slice_: RowSlice) -> fx.Node:
        windows = pool_windows(slice_.call, num_dims)
        if windows is None or not is_space(slice_.call, slice_.dim, num_dims):
            return slice_.call_same()
        return slice_.call_same(**padded_arguments(slice_, "self", windows, fill))

    return Rule(reads, write)


def nearest(call: Call, dim: int) -> Reads | None:
    """Nearest-neighbour resizing by an integer factor: each input row becomes `factor` rows."""
    first = next(iter(call.tensors()))
    if dim < 2:
        return {first: Rows(dim)}
    factor, remainder = divmod(call.shape[dim], call.size(first)[dim])
    scales = call.get("scale_factors") or [v for k, v in call.values.items() if "scales" in k]
    scales = [scale for scale in scales if scale is not None]
    if remainder or (scales and scales[dim - 2] != factor):
        return None
    return {first: Rows(dim, Fraction(1, factor))}


def write_nearest(slice_: RowSlice) -> fx.Node:
    """Scales stay: a scale of another dimension need not be the ratio of its sizes."""
    if slice_.call.get("scale_factors"):
        return slice_.call_same()
    return slice_.call_same(output_size=slice_.shape[2:])


def not_space(num_dims: int) -> Rule:
    """The same rows of the first tensor, along any dimension but the last `num_dims`."""
    return Rule(lambda call, dim: None if is_space(call, dim, num_dims) else same_rows(call, dim))


def pixel_shuffle(call: Call, dim: int) -> Reads:
    """(c * factor**2, h, w) -> (c, h * factor, w * factor), and the inverse."""
    upscale = call.get("upscale_factor")
    factor = Fraction(upscale) if upscale else Fraction(1, call["downscale_factor"])
    scales = {3: factor**2, 2: 1 / factor, 1: 1 / factor}  # by the dimension, from the end
    return {"self": Rows(dim, scales.get(len(call.shape) - dim, Fraction(1)))}


def batch_norm(call: Call, dim: int) -> Reads | None:
    """With running statistics; a wall where it computes the statistics of the batch."""
    if call["training"]:
        return None
    per_channel = ("weight", "bias", "running_mean", "running_var")
    return {"input": Rows(dim), **{name: Rows(0) for name in per_channel if dim == 1}}


def table_1d_to_3d(names: str, make_rule: Callable[[int], Rule]) -> Table:
    """The rules of operators over n = 1, 2 and 3 dimensions of space; `names` contain {n}."""
    return {
        getattr(aten, name.format(n=n)): make_rule(n) for n in (1, 2, 3) for name in names.split()
    }


TABLE: Table = {
    **table_1d_to_3d("conv{n}d", lambda n: Rule(convolution, write_convolution)),
    **table_1d_to_3d("max_pool{n}d", lambda n: pool(n, -inf)),
    **table_1d_to_3d("avg_pool{n}d", lambda n: pool(n, 0.0)),
    **table_1d_to_3d("adaptive_avg_pool{n}d reflection_pad{n}d replication_pad{n}d", not_space),
    **table_1d_to_3d(
        "upsample_nearest{n}d _upsample_nearest_exact{n}d", lambda n: Rule(nearest, write_nearest)
    ),
    aten.batch_norm: Rule(batch_norm),
    **table_1d_to_3d("conv_transpose{n}d", lambda n: Rule(transposed_convolution)),
    aten.convolution: Rule(convolution, write_convolution),
    **table(Rule(pixel_shuffle), "pixel_shuffle pixel_unshuffle"),
    aten.upsample_trilinear3d: not_space(3),
    **table(not_space(2), "upsample_bicubic2d upsample_bilinear2d"),
    aten.upsample_linear1d: not_space(1),
}
