"""Gradients between ranks: of linear maps that move rows, through their transpose; once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Any]
Move = Callable[[Tensor, str], Tensor]  # (tensor, label of its messages) -> tensor

below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
"""`with below_autograd():` operators skip autograd, which would note every view and every write.
For functions that compute their gradients themselves, and that alone hold what they write to.

Source: Note [AutoDispatchBelowAutograd] in ATen/core/LegacyTypeDispatch.h, "for kernel
implementations"."""


def first_order_only(backward: Backward) -> Backward:
    """A backward of an autograd function that is refused where its result is differentiated again.

    torch's `once_differentiable` lets it pass where the incoming gradients need no gradient, and
    the part through this function is lost.

    Raises:
        NotImplementedError: under create_graph=True.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward: create_graph=True
            raise NotImplementedError(
                "double backward (create_graph=True) through sp.attention, sp.shard, sp.unshard or "
                "sp.loss is not supported: take the gradient penalty of modules behind them, or on "
                "one process with torch's own attention"
            )
        return backward(ctx, *grads)

    return call


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, label: str) -> Tensor:
        ctx.back, ctx.label = back, label
        return there(x, f"forward {label}")

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, f"backward {ctx.label}"), None, None, None


def move(x: Tensor, there: Move, back: Move, label: str) -> Tensor:
    """there(x); the gradient is brought by `back`, the transpose of `there`."""
    return _Adjoint.apply(x, there, back, label)
