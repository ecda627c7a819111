"""What the parameters and modules of a model are while it is split.

Modules compute as they did, and so do graphs that torch.export captured: each calls an operator
with the weight among its arguments, and torch asks the weight's class what to do.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.hetegen.modules import HostWeight, stacks_of_experts
from wf_backends.hetegen.runner import Runner, Uncopied

MARK = "_wf_hetegen_split"  # an attribute of modules while they are split
aten = torch.ops.aten

# Operators that the lanes compute, with the weight's dimension of output features.
PRODUCTS: dict[Any, tuple[int, tuple[str, ...]]] = {
    F.linear: (0, ("input", "weight", "bias")),
    aten.linear.default: (0, ("input", "weight", "bias")),
    torch.addmm: (1, ("bias", "input", "weight")),
    aten.addmm.default: (1, ("bias", "input", "weight")),
    torch.matmul: (1, ("input", "weight")),
    Tensor.matmul: (1, ("input", "weight")),
    F.embedding: (0, ("input", "weight")),
    aten.embedding.default: (0, ("weight", "input")),
}
LOOKUPS = (F.embedding, aten.embedding.default)
SLICES = (Tensor.narrow, aten.slice.Tensor)  # by which a chunked graph reads part of a weight


class SplitWeight(nn.Parameter):
    """A parameter while its weight is split. To all but products it is a tensor in host memory.

    Attributes:
        where: the device of the products, which the parameter says is its own.
        runner, index: who computes the products, and the number of the weight there.
        rows_dim: that of its output features; None of a parameter that holds a layer's experts.
        experts: the split weight of each of these.
    """

    where: torch.device
    runner: Runner
    index: int
    rows_dim: int | None = None
    experts: list[SplitWeight] | None = None

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.where

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()  # which counts what is written to it

    @data.setter
    def data(self, other: Tensor) -> None:
        """Take what it has; refuse other memory or another type."""
        if (other.data_ptr(), other.dtype) != (self.data_ptr(), self.dtype):
            raise ValueError(
                "a split weight is neither moved nor converted nor replaced: call handle.remove() "
                "first"
            )

    def __getitem__(self, index: Any) -> Tensor:
        if self.experts is None:
            return super().__getitem__(index)
        if not isinstance(index, int | Tensor) or isinstance(index, Tensor) and index.numel() != 1:
            raise NotImplementedError(
                "split experts are read one expert at a time, not by "
                f"{type(index).__name__} of several"
            )
        return self.experts[int(index)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A parameter that is not split, where it alone is copied or pickled."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SLICES:
            raise NotImplementedError(
                "a split weight is not sliced: call dispatch_model before autochunk"
            )
        dim, names = PRODUCTS.get(func, (0, ()))
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        weight = given.pop("weight", None)
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(weight, cls) or weight.rows_dim != dim:
                return func(*args, **kwargs)
            if func in LOOKUPS:
                return weight.runner.lookup(weight.index, given["input"])
            return weight.runner.linear(weight.index, given.pop("input"), **given)


def split_weights(
    model: nn.Module, weights: list[HostWeight], runner: Runner, undo: ExitStack
) -> None:
    """Have the runner compute the products of these weights, and told of calls, until `undo`."""
    for module in model.modules():
        if any(True for _ in module.children()):
            undo.callback(module.register_forward_pre_hook(runner.enter, prepend=True).remove)
            undo.callback(module.register_forward_hook(runner.leave, always_call=True).remove)
        if stacks_of_experts(module):  # it runs its own code, which takes one expert at a time
            own = inspect.unwrap(type(module).forward)
            _set(undo, module, forward=MethodType(own, module))
    for index, weight in enumerate(weights):
        parameter: Any = weight.parameter
        if parameter.dim() == 3:  # it holds all experts of a layer
            if not hasattr(parameter, "experts"):
                _become_split(parameter, undo, where=runner.where, experts=[])
            one = nn.Parameter(weight.tensor, requires_grad=False)
            parameter.experts.append(one)
            parameter = one
        told = {"runner": runner, "index": index, "rows_dim": weight.dim}
        _become_split(parameter, undo, where=runner.where, **told)


def _become_split(parameter: Any, undo: ExitStack, **told: Any) -> None:
    undo.callback(setattr, parameter, "__class__", type(parameter))
    parameter.__class__ = SplitWeight
    _set(undo, parameter, **told)


def _set(undo: ExitStack, of: Any, **attributes: Any) -> None:
    """Give an object attributes of its own, until `undo`."""
    for name, value in attributes.items():
        if name in vars(of):
            undo.callback(setattr, of, name, vars(of)[name])
        else:
            undo.callback(delattr, of, name)
        setattr(of, name, value)


def mark_modules(model: nn.Module, undo: ExitStack) -> None:
    """Have its modules refuse what would leave copies of old weights in use, until `undo`."""
    mark = Uncopied()
    for module in model.modules():
        _set(undo, module, **{MARK: mark, "_apply": partial(_refuse_to_convert, module)})
        undo.callback(module.register_load_state_dict_pre_hook(_refuse_to_load).remove)


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    raise ValueError(
        f"{type(module).__name__} is split by dispatch_model and takes no weights: "
        "call handle.remove() first, and dispatch_model after load_state_dict"
    )


def _refuse_to_convert(
    module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """What model.to(...) calls, in place of `nn.Module._apply`: take what changes no tensor.

    It refuses before the first is changed, since a model that is half converted computes wrongly.
    """
    named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    with torch.no_grad():
        for name, tensor in named:
            if convert(tensor) is not tensor:
                raise ValueError(
                    f"a split model is neither moved nor converted, and {name} would be: call "
                    "handle.remove() first"
                )
    return module


def check_not_split(model: nn.Module) -> None:
    """Refuse a model that is split, has a part that is, or a weight that another model splits."""
    if any(hasattr(module, MARK) for module in model.modules()):
        raise ValueError("model is split already, or a part of it: call handle.remove() first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitWeight):
            raise ValueError(
                f"model shares {name} with another model that is split: call the other's "
                "handle.remove() first"
            )


def check_not_called(model: nn.Module) -> None:
    """Refuse to put a split model back within a call of it, this thread's or another's.

    Stacks tell, since no hook does where Ctrl-C ended a call. What has no modules inside, such as a
    linear, another thread may call: the runner does it or refuses it.
    """
    split = {module for module in model.modules() if hasattr(module, MARK)}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        own = ident == threading.get_ident()
        called = {module for module in split if own or any(True for _ in module.children())}
        for frame, _ in traceback.walk_stack(top):
            if frame.f_code is nn.Module.__call__.__code__ and frame.f_locals["self"] in called:
                raise RuntimeError(
                    "handle.remove() within a call of the model: call it when the call has ended"
                    if own
                    else f"handle.remove() while the thread {names.get(ident)!r} calls the model: "
                    "wait for the end of its call, then call handle.remove() again"
                )
