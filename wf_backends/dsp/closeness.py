"""How far what ranks compute is from what one computes, and how far it may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-4  # of the largest element, in float32 and wider
NARROW_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
SMALL = 1e-6  # the largest element of an output that is 0 but for rounding


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in what a module returns, by name or index."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
        return
    items = output.items() if isinstance(output, Mapping) else None
    if items is None:
        items = enumerate(output) if isinstance(output, tuple | list) else ()
    for key, value in items:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def error_between(part: Tensor, whole: Tensor, least: float = SMALL) -> float:
    """The largest difference / the largest element of `whole`, or `least` if that is more."""
    if not whole.numel():
        return 0.0
    part, whole = (
        x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (part, whole)
    )
    same = (part == whole) | (part.isnan() & whole.isnan())  # inf and NaN are no difference
    difference = torch.where(same, 0.0, part - whole).abs().max()
    size = whole.abs().nan_to_num(0.0, posinf=float("inf")).max()
    found = float(difference / size.clamp(min=least))
    return found if found == found else float("inf")
