"""A linear map that moves rows between ranks, differentiable through its transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor, str], Tensor]  # (tensor, label of its messages) -> tensor


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, label: str) -> Tensor:
        ctx.back, ctx.label = back, label
        return there(x, f"forward {label}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, f"backward {ctx.label}"), None, None, None


def move(x: Tensor, there: Move, back: Move, label: str) -> Tensor:
    """there(x); the gradient is brought by `back`, the transpose of `there`."""
    return _Adjoint.apply(x, there, back, label)
