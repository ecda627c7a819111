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
    not_last,
    same_rows,
    table,
)
from wf_backends.autochunk.slicing.rules_views import outside


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


def conv_windows(call: Call) -> Sequence[Rows | None]:
    """None if transposed, or where padding "same" pads two sides differently."""
    kernel, padding = call.size("weight")[2:], call["padding"]
    dilation = _per_dimension(call["dilation"], len(kernel))
    beyond = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    uneven = padding == "same" and any(rows % 2 for rows in beyond)
    if uneven or call.get("transposed"):
        return [None] * len(kernel)
    if isinstance(padding, str):
        padding = [rows // 2 if padding == "same" else 0 for rows in beyond]
    return windows_of(call, kernel, call["stride"], padding, dilation)


def pool_windows(call: Call, num_dims: int) -> Sequence[Rows | None]:
    """None for integers, or if windows at the border are incomplete."""
    padded = any(_per_dimension(call["padding"], num_dims))
    if (
        call["ceil_mode"]
        or not call["self"].meta["val"].is_floating_point()
        or (padded and not call.get("count_include_pad", True))
    ):
        return [None] * num_dims
    kernel = _per_dimension(call["kernel_size"], num_dims)
    stride = call["stride"] or kernel
    return windows_of(call, kernel, stride, call["padding"], call.get("dilation", 1))


def windowed(
    name: str,
    find_windows: Callable[[Call], Sequence[Rows | None]],
    other_reads: Callable[[Call, int], Reads | None],
    fill: float,
) -> Rule:
    """The rule for an operator on windows of its argument `name`, which it pads with `fill`.

    `find_windows` gives the rows that a slice along each dimension of space reads, None where it
    cannot be sliced; `other_reads` what a slice along the batch or the channels reads.
    """

    def reads(call: Call, dim: int) -> Reads | None:
        windows, from_end = find_windows(call), len(call.shape) - dim
        if from_end > len(windows):
            return other_reads(call, dim)
        rows = windows[-from_end]
        return None if rows is None else {name: rows}

    def write(slice_: RowSlice) -> fx.Node:
        """Where the slice needs more padding on one side than on the other, the input is padded
        first."""
        windows, from_end = find_windows(slice_.call), len(slice_.call.shape) - slice_.dim
        if from_end > len(windows):
            return slice_.call_same()
        padding = [window.before for window in windows if window]
        first, last = windows[-from_end].unclipped(slice_.lo, slice_.hi)  # type: ignore[union-attr]
        before, after = outside(first, last, slice_.call.size(name)[slice_.dim])
        changed: dict[str, Any] = {"padding": padding}
        padding[-from_end] = before if before == after else 0
        if before != after:
            pad = [0, 0] * (from_end - 1) + [before, after]
            tensor = slice_.arguments[name]
            changed[name] = slice_.call_function(aten.constant_pad_nd.default, tensor, pad, fill)
        call = slice_.call_same(**changed)
        call.target = slice_.call.target.overloadpacket.default  # takes no "same"
        return call

    return Rule(reads, write)


def batch_or_channels(call: Call, dim: int) -> Reads | None:
    """A convolution along the batch, or output channels (if each reads all input channels)."""
    if dim == 0 and len(call.shape) == len(call.size("weight")):  # an input may have no batch
        return {"input": Rows(0)}
    is_plain = call["groups"] == 1 and not call.get("transposed")
    return {"weight": Rows(0), "bias": Rows(0)} if is_plain else None


def pool(num_dims: int, fill: float) -> Rule:
    """The rule for a pooling operator over `num_dims` dimensions of space, padded with `fill`."""
    return windowed("self", lambda call: pool_windows(call, num_dims), same_rows, fill)


def transposed_windows(call: Call, dim: int) -> Rows | None:
    """The input rows that a slice of a transposed convolution reads along a dimension of space;
    None if it has not `stride` rows for each of the input's, or rows that no input reaches."""
    num_dims = len(call.shape) - 2
    names = ("stride", "padding", "output_padding", "dilation")
    step, pad, extra, gap = (_per_dimension(call[name], num_dims)[dim - 2] for name in names)
    if call.shape[dim] != step * call.size("input")[dim] or extra > pad:
        return None
    reach = gap * (call.size("weight")[dim] - 1)
    after = (pad - 1) // step + 1
    return Rows(dim, Fraction(1, step), before=(reach - pad) // step, after=after)


def transposed(call: Call, dim: int) -> Reads | None:
    """A transposed convolution along the batch, output channels or space."""
    if len(call.shape) != len(call.size("weight")):
        return None
    if dim == 1:
        return {"weight": Rows(1), "bias": Rows(0)} if call["groups"] == 1 else None
    rows = Rows(0) if dim == 0 else transposed_windows(call, dim)
    return None if rows is None else {"input": rows}


def write_transposed(slice_: RowSlice) -> fx.Node:
    """Without padding along the dimension, which would crop the slice; then its rows are cut."""
    call, dim = slice_.call, slice_.dim
    rows = transposed_windows(call, dim) if dim > 1 else None
    if rows is None:
        return slice_.call_same()
    num_dims, step = len(call.shape) - 2, rows.scale.denominator
    pads, extras = (_per_dimension(call[name], num_dims) for name in ("padding", "output_padding"))
    start = slice_.lo + pads[dim - 2] - step * max(0, rows.unclipped(slice_.lo, slice_.hi)[0])
    pads[dim - 2] = extras[dim - 2] = 0
    whole = slice_.call_same(padding=pads, output_padding=extras)
    return slice_.call_function(aten.slice.Tensor, whole, dim, start, start + slice_.hi - slice_.lo)


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


CONVOLUTION = windowed("input", conv_windows, batch_or_channels, 0.0)

TABLE: Table = {
    **table_1d_to_3d("conv{n}d", lambda n: CONVOLUTION),
    **table_1d_to_3d("max_pool{n}d", lambda n: pool(n, -inf)),
    **table_1d_to_3d("avg_pool{n}d", lambda n: pool(n, 0.0)),
    **table_1d_to_3d("adaptive_avg_pool{n}d reflection_pad{n}d replication_pad{n}d", not_last),
    **table_1d_to_3d(
        "upsample_nearest{n}d _upsample_nearest_exact{n}d", lambda n: Rule(nearest, write_nearest)
    ),
    aten.batch_norm: Rule(batch_norm),
    **table_1d_to_3d("conv_transpose{n}d", lambda n: Rule(transposed, write_transposed)),
    aten.convolution: CONVOLUTION,
    **table(Rule(pixel_shuffle), "pixel_shuffle pixel_unshuffle"),
    aten.upsample_trilinear3d: not_last(3),
    **table(not_last(2), "upsample_bicubic2d upsample_bilinear2d"),
    aten.upsample_linear1d: not_last(1),
}
