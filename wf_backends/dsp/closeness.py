"""The difference between what several ranks compute and what one computes; its tolerances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isnan
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-4  # of the largest element, in float32 and wider
NARROW_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
SMALL = 1e-6  # an output without larger elements is 0 but for rounding


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in what a module returns: tensors, and in tuples, lists, mappings and
    dataclasses, by name or index."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
        return
    if isinstance(output, tuple | list):
        output = dict(enumerate(output))
    elif is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    for key, value in output.items() if isinstance(output, Mapping) else ():
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def error_between(part: Tensor, whole: Tensor, min_scale: float = SMALL) -> float:
    """The largest difference / max(the largest element of `whole`, min_scale).

    The largest besides infinite ones, and those near the largest number of the dtype, which hide
    tokens as infinite ones do. inf where only one of the two is NaN, or infinite.
    """
    if not whole.numel():
        return 0.0
    part, whole = (
        x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (part, whole)
    )
    same = (part == whole) | (part.isnan() & whole.isnan())  # equal inf and NaN do not differ
    difference = torch.where(same, 0.0, part - whole).abs().max()
    sizes = whole.abs()
    scale = torch.where(sizes < torch.finfo(sizes.dtype).max / 2, sizes, 0.0).max()
    error = float(difference / scale.clamp(min=min_scale))
    return float("inf") if isnan(error) else error
