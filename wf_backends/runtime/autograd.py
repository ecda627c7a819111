"""Gradients of linear maps that move rows between ranks, and functions differentiable only once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from wf_backends._compile import eager, refuse_transforms

Backward = Callable[..., Any]
RowMap = Callable[[Tensor, str], Tensor]  # (tensor, label of its messages) -> tensor

below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
"""`with below_autograd():` operators skip autograd, which would record every view and every write.
For functions that compute their gradients themselves and write only to buffers of their own.

Source: Note [AutoDispatchBelowAutograd] in ATen/core/LegacyTypeDispatch.h, "for kernel
implementations"."""


def first_order_only(backward: Backward) -> Backward:
    """Decorate the backward of an autograd function: it raises in a double backward, and in a
    vmap of gradients (is_grads_batched, the vectorized Jacobian).

    torch's `once_differentiable` does not raise where the incoming gradients need no gradient; the
    second derivative through this function would be missing without a word.

    Raises:
        NotImplementedError: under create_graph=True or torch.vmap.
    """

    @wraps(backward)
    def checked_backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward: create_graph=True
            raise NotImplementedError(
                "double backward (create_graph=True) through sp.attention, sp.shard, sp.unshard, "
                "sp.loss or a tiled module is not supported: take the gradient penalty of modules "
                "behind them, or on one process with torch's own attention and without tiles"
            )
        for grad in filter(torch.is_tensor, grads):
            refuse_transforms("a backward", "take one gradient after the other", gradient=grad)
        return backward(ctx, *grads)

    return eager(checked_backward)  # torch would trace it in a compiled step that calls backward()


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: RowMap, transpose: RowMap, label: str) -> Tensor:
        ctx.transpose, ctx.label = transpose, label
        return forward(x, f"forward {label}")

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transpose(grad, f"backward {ctx.label}"), None, None, None


def linear_map(x: Tensor, forward: RowMap, transpose: RowMap, label: str) -> Tensor:
    """forward(x), a linear map; the gradient of x is `transpose` of the result's gradient."""
    return _LinearMap.apply(x, forward, transpose, label)
