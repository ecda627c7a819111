"""A parameter that has its products computed by the lanes, whoever asks for them.

Modules stay as they are, and so do graphs that torch.export captured: each calls an operator with
the weight among its arguments, and torch asks the weight's class what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.hetegen.modules import HostWeight, stacks_of_experts
from wf_backends.hetegen.runner import Runner

aten = torch.ops.aten
DATA: Any = Tensor.data  # the descriptor


class SplitWeight(nn.Parameter):
    """What a parameter is while its weight is split.

    Attributes:
        products: "linear", "addmm" or "embedding" -> what computes it, with that operator's
            arguments but for the weight.
        experts: of a parameter that holds a layer's experts, the split weight of each.
        where: the device of the products, which the parameter says is its own.
    """

    products: Mapping[str, Callable[..., Tensor]]
    experts: list[SplitWeight]
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
        if func == Tensor.__getitem__ and "experts" in vars(args[0]):
            return _of_expert(*args)
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
    torch.matmul: ("matmul", 1),
    Tensor.matmul: ("matmul", 1),
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


def _of_expert(weight: SplitWeight, index: Any) -> SplitWeight:
    if not isinstance(index, int | Tensor) or isinstance(index, Tensor) and index.numel() != 1:
        raise NotImplementedError(
            f"split experts are read one expert at a time, not by {type(index).__name__} of several"
        )
    return weight.experts[int(index)]


def split_weights(
    model: nn.Module, weights: list[HostWeight], runner: Runner, undo: ExitStack
) -> None:
    """Have the runner compute the products of these weights, until `undo`."""
    for module in model.modules():
        if stacks_of_experts(module):
            _read_expert_by_expert(module, undo)
    for index, weight in enumerate(weights):
        parameter = weight.parameter
        if weight.expert is not None:
            if not weight.expert:
                _mark(parameter, undo, experts=[], where=runner.where)
            of_all, parameter = parameter, nn.Parameter(weight.tensor, requires_grad=False)
            of_all.experts.append(parameter)
        products = _products(weight, runner, index)
        _mark(parameter, undo, products=products, where=runner.where)


def _read_expert_by_expert(layer: nn.Module, undo: ExitStack) -> None:
    """Have a layer run its own code, in place of one that multiplies with all experts at once."""
    if "forward" in vars(layer):  # as accelerate's hooks leave it
        undo.callback(setattr, layer, "forward", layer.forward)
    else:
        undo.callback(delattr, layer, "forward")
    layer.forward = MethodType(inspect.unwrap(type(layer).forward), layer)


def _mark(parameter: Any, undo: ExitStack, **told: Any) -> None:
    undo.callback(setattr, parameter, "__class__", type(parameter))
    parameter.__class__ = SplitWeight
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
        return {"addmm": lambda bias, input: linear(input, bias), "matmul": linear}
    return {"linear": linear, "embedding": embedding, "table": embedding}
