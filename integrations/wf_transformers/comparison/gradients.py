"""Gradients of a loss, in few numbers each, without a trace in parameters or engines."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WHOLE_GRADIENT = 1 << 16  # elements; of larger gradients a projection of each row is compared


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Summaries of gradients by parameter. Nothing of them gets to the parameters, or to engines.

    One gradient at a time, so that a large model needs no memory for all of them.
    """
    found: dict[str, Tensor] = {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        for name, p in parameters.items():

            def take(gradient: Tensor, name: str = name) -> Tensor:
                found[name] = summary(gradient)
                return gradient.new_zeros(()).expand_as(gradient)

            stack.callback(p.register_hook(take).remove)
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return found


def is_partitioned(p: nn.Parameter) -> bool:
    """Whether an engine keeps a part of it on this rank."""
    return isinstance(p, DTensor) or hasattr(p, "ds_id") or type(p).__name__ == "ColoParameter"


def summary(gradient: Tensor) -> Tensor:
    """(n,) float64: all elements of a small gradient, a projection of each row of a large one."""
    if gradient.numel() <= WHOLE_GRADIENT or gradient.dim() < 2:
        return gradient.detach().double().flatten()
    rows = gradient.detach().flatten(0, -2)
    wide = torch.promote_types(rows.dtype, torch.float32)
    direction = torch.arange(rows.shape[1], device=rows.device).cos().to(wide)
    return (rows.to(wide) @ direction).double()
