"""A parameter that has its products computed by the lanes, whoever asks for them.

Modules stay as they are, and so do graphs that torch.export captured: each calls an operator with
the weight among its arguments, and torch asks the weight's class what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.hetegen.modules import HostWeight
from wf_backends.hetegen.runner import Runner

aten = torch.ops.aten
DATA: Any = Tensor.data  # the descriptor


class SplitWeight(nn.Parameter):
    """What a parameter is while its weight is split.

    Attributes:
        products: "linear", "addmm" or "embedding" -> what computes it, with that operator's
            arguments but for the weight.
        where: the device of the products, which the parameter says is its own.
    """

    products: Mapping[str, Callable[..., Tensor]]
    where: torch.device

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A parameter that is not split, where it alone is copied or pickled."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SLICES:
            raise NotImplementedError(
                "a split weight is not sliced: call dispatch_model before autochunk"
            )
        if func == Tensor.device.__get__ and "where" in vars(args[0]):
            return args[0].where
        if func == DATA.__get__:  # that counts what is written to it, unlike data
            return args[0].detach()
        if func == DATA.__set__:
            return _refuse_to_move(*args)
        name, place = PRODUCTS.get(func, ("", 0))
        weight = args[place] if len(args) > place else kwargs.get("weight")
        products = vars(weight).get("products", {}) if isinstance(weight, cls) else {}
        with torch._C.DisableTorchFunctionSubclass():
            if name not in products:  # it is a tensor in host memory to all else
                return func(*args, **kwargs)
            rest = {key: value for key, value in kwargs.items() if key != "weight"}
            return products[name](*args[:place], *args[place + 1 :], **rest)


# Operators that are computed by lanes, with the place of the weight among their arguments.
PRODUCTS: dict[Any, tuple[str, int]] = {
    F.linear: ("linear", 1),
    aten.linear.default: ("linear", 1),
    torch.addmm: ("addmm", 2),
    aten.addmm.default: ("addmm", 2),
    F.embedding: ("embedding", 1),
    aten.embedding.default: ("table", 0),
}
SLICES = (Tensor.narrow, aten.slice.Tensor)  # by which a chunked graph reads part of a weight


def _refuse_to_move(weight: Tensor, other: Tensor) -> None:
    """Refuse other memory or another type, as model.to(...) gives it; the same again is no change.

    Raises:
        ValueError: naming what would be right.
    """
    if (other.data_ptr(), other.dtype) != (weight.data_ptr(), weight.dtype):
        raise ValueError(
            "a split weight is neither moved nor converted nor replaced: call handle.remove() first"
        )


def split_weights(weights: list[HostWeight], runner: Runner, undo: ExitStack) -> None:
    """Have the runner compute the products of these weights."""
    for index, weight in enumerate(weights):
        parameter: Any = weight.module.weight
        undo.callback(setattr, parameter, "__class__", type(parameter))
        parameter.__class__ = SplitWeight
        told = {"products": _products(weight, runner, index), "where": runner.where}
        for name, value in told.items():
            setattr(parameter, name, value)
            undo.callback(delattr, parameter, name)


def _products(weight: HostWeight, runner: Runner, index: int) -> dict[str, Callable[..., Tensor]]:
    @eager
    def linear(input: Tensor, bias: Tensor | None = None) -> Tensor:
        out = runner.linear(index, input)
        return out if bias is None else out.add_(bias)

    @eager
    def embedding(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return runner.lookup(index, input)

    if weight.dim == 1:
        return {"addmm": lambda bias, input: linear(input, bias)}
    return {"linear": linear, "embedding": embedding, "table": embedding}
