"""Rules for convolutions, pooling, resizing and norms of images: (batch, channels, space ...).

A slice of space reads a halo: the rows that the first and the last window reach beyond it. At the
border of the input, where the halo ends, the slice gets its share of the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from torch import fx

from wf_backends.slicing.call import Call, Reads, Rows, Rule, Slice, Table, aten, same_rows, table
from wf_backends.slicing.rules_select import border


def windows_of(
    call: Call, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> list[Rows]:
    """The rows under the windows of a slice, for each dimension of space.

    `stride`, `padding` and `dilation` are one number for all of these, or one for each.
    """
    first, found = len(call.shape) - len(kernel), []
    steps, pads, gaps = (_per_dimension(x, len(kernel)) for x in (stride, padding, dilation))
    for dim, (size, step, pad, gap) in enumerate(
        zip(kernel, steps, pads, gaps, strict=True), first
    ):
        after = gap * (size - 1) + 1 - step - pad
        found.append(Rows(dim, Fraction(step), before=pad, after=after))
    return found


def _per_dimension(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


def conv_windows(call: Call) -> list[Rows] | None:
    """None where "same" pads one side more than the other."""
    kernel, padding = call.size("weight")[2:], call["padding"]
    if isinstance(padding, str):
        gaps = _per_dimension(call["dilation"], len(kernel))
        total = [d * (k - 1) * (padding == "same") for d, k in zip(gaps, kernel, strict=True)]
        if any(rows % 2 for rows in total):
            return None
        padding = [rows // 2 for rows in total]
    return windows_of(call, kernel, call["stride"], padding, call["dilation"])


def pool_windows(call: Call, count: int) -> list[Rows] | None:
    """None where the last window may hang over the border."""
    padded = any(_per_dimension(call["padding"], count))
    if (
        call["ceil_mode"]
        or not call["self"].meta["val"].is_floating_point()
        or (padded and not call.get("count_include_pad", True))
    ):
        return None
    kernel = _per_dimension(call["kernel_size"], count)
    return windows_of(
        call, kernel, call["stride"] or kernel, call["padding"], call.get("dilation", 1)
    )


def write_windowed(new: Slice, name: str, windows: list[Rows], fill: float) -> dict[str, Any]:
    """The arguments that a slice of space replaces: the input with its border, and the padding."""
    from_end = len(new.call.shape) - new.dim
    rows = windows[-from_end].read(new.lo, new.hi)
    front, back = border(*rows, new.call.size(name)[new.dim])
    padding, tensor = [own.before for own in windows], new.given[name]
    if front == back:
        padding[-from_end] = front
    else:
        padding[-from_end] = 0
        pad = [0, 0] * (from_end - 1) + [front, back]
        tensor = new.put(aten.constant_pad_nd.default, tensor, pad, fill)
    return {name: tensor, "padding": padding}


def is_space(call: Call, dim: int, count: int) -> bool:
    return dim >= len(call.shape) - count


def convolution(call: Call, dim: int) -> Reads | None:
    """By batch, by output channels where each reads all inputs, or by space."""
    space = len(call.size("weight")) - 2
    channels = len(call.shape) - space - 1
    if dim < channels:
        return {"input": Rows(dim)}
    if call.get("transposed"):
        return None
    if dim == channels:
        return {"weight": Rows(0), "bias": Rows(0)} if call["groups"] == 1 else None
    found = conv_windows(call)
    return None if found is None else {"input": found[dim - len(call.shape)]}


def write_convolution(new: Slice) -> fx.Node:
    if not is_space(new.call, new.dim, len(new.call.size("weight")) - 2):
        return new.again()
    windows = conv_windows(new.call)
    assert windows is not None
    changed = write_windowed(new, "input", windows, 0.0)
    numeric = new.call.target.overloadpacket.default  # not the overload that takes "same"
    return new.put(numeric, **{**new.given, **changed})


def transposed_convolution(call: Call, dim: int) -> Reads | None:
    return {"input": Rows(0)} if dim == 0 and len(call.shape) == len(call.size("weight")) else None


def pool(count: int, fill: float) -> Rule:
    """A pooling operator over `count` dimensions of space, whose padding is `fill`."""

    def reads(call: Call, dim: int) -> Reads | None:
        if not is_space(call, dim, count):
            return {"self": Rows(dim)}
        found = pool_windows(call, count)
        return None if found is None else {"self": found[dim - len(call.shape)]}

    def write(new: Slice) -> fx.Node:
        windows = pool_windows(new.call, count)
        if windows is None or not is_space(new.call, new.dim, count):
            return new.again()
        return new.again(**write_windowed(new, "self", windows, fill))

    return Rule(reads, write)


def nearest(call: Call, dim: int) -> Reads | None:
    """By a whole factor: each row of the input gives as many rows of the output."""
    name = next(iter(call.tensors()))
    size, wanted = call.size(name)[dim], call.shape[dim]
    if dim < 2:
        return {name: Rows(dim)}
    scales = call.get("scale_factors") or [v for k, v in call.values.items() if "scales" in k]
    given = [scale for scale in scales if scale is not None]
    if wanted % size or (given and given[dim - 2] != wanted // size):
        return None
    return {name: Rows(dim, Fraction(size, wanted))}


def write_nearest(new: Slice) -> fx.Node:
    if new.dim < 2:
        return new.again()
    scales = {name: None for name in new.given if "scale" in name}
    return new.again(output_size=new.shape[2:], **scales)


def in_front(count: int) -> Rule:
    """By any dimension in front of the last `count`."""

    return Rule(lambda call, dim: None if is_space(call, dim, count) else same_rows(call, dim))


def shuffled(call: Call, dim: int) -> Reads:
    """pixel_shuffle and its inverse: `factor` ** 2 channels for `factor` rows and columns."""
    up = call.get("upscale_factor")
    factor = Fraction(up) if up else Fraction(1, call["downscale_factor"])
    scales = {3: factor**2, 2: 1 / factor, 1: 1 / factor}
    return {"self": Rows(dim, scales.get(len(call.shape) - dim, Fraction(1)))}


def batch_norm(call: Call, dim: int) -> Reads | None:
    """With running statistics; a wall where it computes those of the batch."""
    if call["training"]:
        return None
    per_channel = ("weight", "bias", "running_mean", "running_var")
    return {"input": Rows(dim), **{name: Rows(0) for name in per_channel if dim == 1}}


def group_norm(call: Call, dim: int) -> Reads | None:
    """By batch. By space its two passes are apart: see group_norm.py."""
    return {"input": Rows(0)} if dim == 0 else None


def families(names: str, make: Callable[[int], Rule]) -> Table:
    """`names` with {n} for 1, 2 and 3 dimensions of space."""
    return {getattr(aten, name.format(n=n)): make(n) for n in (1, 2, 3) for name in names.split()}


TABLE: Table = {
    **families("conv{n}d", lambda n: Rule(convolution, write_convolution)),
    **families("max_pool{n}d", lambda n: pool(n, -inf)),
    **families("avg_pool{n}d", lambda n: pool(n, 0.0)),
    **families("adaptive_avg_pool{n}d reflection_pad{n}d replication_pad{n}d", in_front),
    **families(
        "upsample_nearest{n}d _upsample_nearest_exact{n}d", lambda n: Rule(nearest, write_nearest)
    ),
    aten.batch_norm: Rule(batch_norm),
    **families("conv_transpose{n}d", lambda n: Rule(transposed_convolution)),
    aten.convolution: Rule(convolution, write_convolution),
    aten.group_norm: Rule(group_norm),
    **table(Rule(shuffled), "pixel_shuffle pixel_unshuffle"),
    aten.upsample_trilinear3d: in_front(3),
    **table(in_front(2), "upsample_bicubic2d upsample_bilinear2d"),
    aten.upsample_linear1d: in_front(1),
}
