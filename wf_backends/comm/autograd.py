"""A linear map that moves rows between ranks, differentiable through its transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Move = Callable[[Tensor, str], Tensor]  # (tensor, label of its messages) -> tensor
MoveAll = Callable[[Tensors, str], Tensors]  # the same of several tensors, in one exchange


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: MoveAll, back: MoveAll, label: str, *xs: Tensor) -> Tensors:
        ctx.back, ctx.label = back, label
        return there(xs, f"forward {label}")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.back(grads, f"backward {ctx.label}"))


def move_all(xs: Tensors, there: MoveAll, back: MoveAll, label: str) -> Tensors:
    """there(xs); the gradients are brought together by `back`, the transpose of `there`."""
    return _Adjoint.apply(there, back, label, *xs)


def move(x: Tensor, there: Move, back: Move, label: str) -> Tensor:
    """there(x); the gradient is brought by `back`, the transpose of `there`."""

    def alone(one: Move) -> MoveAll:
        return lambda xs, label: (one(xs[0], label),)

    return move_all((x,), alone(there), alone(back), label)[0]
