"""Summaries of the gradients of a loss, computed without touching parameters or engines."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MAX_UNPROJECTED = 1 << 16  # elements; larger gradients are compared by a projection of each row


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Summaries of gradients by parameter name. No gradient reaches the parameters or an engine.

    Gradients are summarised one at a time, so that a large model needs no memory for all of them.
    """
    summaries: dict[str, Tensor] = {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        for name, p in parameters.items():

            def summarise(gradient: Tensor, name: str = name) -> Tensor:
                summaries[name] = summary(gradient)
                return gradient.new_zeros(()).expand_as(gradient)

            stack.callback(p.register_hook(summarise).remove)
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return summaries


def is_partitioned(p: nn.Parameter) -> bool:
    """Whether an engine keeps only a part of the parameter on this rank."""
    is_marked = hasattr(p, "ds_id") or hasattr(p, "_fsdp_flattened")  # ZeRO 3, FSDP1
    return is_marked or isinstance(p, DTensor) or type(p).__name__ == "ColoParameter"


def summary(gradient: Tensor) -> Tensor:
    """(n,) float64: all elements of a small gradient, a projection of each row of a large one."""
    if gradient.numel() <= MAX_UNPROJECTED or gradient.dim() < 2:
        return gradient.detach().double().flatten()
    rows = gradient.detach().flatten(0, -2)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    direction = torch.arange(rows.shape[1], device=rows.device).cos().to(dtype)
    return (rows.to(dtype) @ direction).double()
