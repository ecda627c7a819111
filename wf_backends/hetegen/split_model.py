"""The parameters and modules of a model while it is split.

Modules keep their code, and so do graphs that torch.export captured: they call an operator with the
weight as an argument, and torch calls the weight's class for it (__torch_function__).
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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.hetegen.modules import FALCON_LINEAR, HostWeight, expert_stacks
from wf_backends.hetegen.runner import Runner, Uncopyable

NOT_ONE_GRAPH = (
    "threads compute the linears of a split model, so that it cannot be one graph: leave out "
    "fullgraph=True (torch.compile), strict=True (torch.export) or torch.jit.trace"
)
MARK = "_wf_hetegen_split"  # an attribute that modules have while they are split
aten = torch.ops.aten

# Operators that the lanes compute -> the weight's dimension of output features, their arguments.
PRODUCTS: dict[Any, tuple[int, tuple[str, ...]]] = {
    F.linear: (0, ("input", "weight", "bias")),
    aten.linear.default: (0, ("input", "weight", "bias")),
    torch.addmm: (1, ("bias", "input", "weight")),
    aten.addmm.default: (1, ("bias", "input", "weight")),
    torch.matmul: (1, ("input", "weight")),
    Tensor.matmul: (1, ("input", "weight")),
    aten.matmul.default: (1, ("input", "weight")),
    F.embedding: (0, ("input", "weight")),
    aten.embedding.default: (0, ("weight", "input")),
}
MATMULS = (torch.matmul, Tensor.matmul, aten.matmul.default)  # the weight may be on the left, too
LOOKUPS = (F.embedding, aten.embedding.default)
SLICES = (Tensor.narrow, aten.slice.Tensor)  # with which a graph of AutoChunk reads a weight


class Products(NamedTuple):
    """What computes the products of a split weight."""

    runner: Runner
    index: int  # the weight's in the runner
    rows_dim: int  # the dimension of output features


class SplitWeight(nn.Parameter):
    """A parameter while its weight is split. Operators not in PRODUCTS see it in host memory.

    `undo` may make it a plain parameter within any call of another thread.

    Attributes:
        compute_device: the device of the products, which is also the parameter's `device`.
        products: computes them; None if the parameter holds all experts of a layer.
        experts: then the split weight of each expert.
    """

    compute_device: torch.device
    products: Products | None = None
    experts: list[SplitWeight] | None = None

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self, "compute_device", None) or Tensor.device.__get__(self)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()  # shares the version counter, so that writing is noticed

    @data.setter
    def data(self, other: Tensor) -> None:
        """Accept the same memory and dtype, which change nothing; refuse others."""
        if (other.data_ptr(), other.dtype) != (self.data_ptr(), self.dtype):
            raise ValueError(
                "a split weight is neither moved nor converted nor replaced: call handle.remove() "
                "first"
            )

    def __getitem__(self, index: Any) -> Tensor:
        experts = getattr(self, "experts", None)
        if experts is None:
            return Tensor.__getitem__(self, index)
        is_number = isinstance(index, int) or (isinstance(index, Tensor) and index.numel() == 1)
        if not is_number:
            raise NotImplementedError(
                "split experts are read one expert at a time, not by "
                f"{type(index).__name__} of several"
            )
        return experts[int(index)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or pickle of the parameter alone is a plain parameter."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    @partial(eager, refusal=NOT_ONE_GRAPH)
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SLICES:
            raise NotImplementedError(
                "a split weight is not sliced: call dispatch_model before autochunk"
            )
        if func is torch.norm_except_dim:
            raise ValueError(  # weight_norm would ignore a NotImplementedError
                "a split weight takes no weight_norm: call handle.remove() first, and "
                "dispatch_model after weight_norm"
            )
        dim, names = PRODUCTS.get(func, (0, ()))
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        weight = arguments.pop("weight", None)
        with torch._C.DisableTorchFunctionSubclass():
            left = _products(arguments.get("input"), 0) if func in MATMULS else None
            if left and _has_columns(weight):
                return left.runner.linear(left.index, weight.mT).mT
            right = _products(weight, dim)
            if right and func in LOOKUPS:
                return right.runner.lookup(right.index, arguments["input"])
            if not right or not arguments.keys() <= {*names}:  # such as addmm's beta
                return func(*args, **kwargs)
            return right.runner.linear(right.index, arguments.pop("input"), **arguments)


def _products(weight: Any, rows_dim: int) -> Products | None:
    """What computes the products of a weight with this dimension of output features, if split."""
    products = getattr(weight, "products", None) if isinstance(weight, SplitWeight) else None
    return products if products and products.rows_dim == rows_dim else None


def _has_columns(x: Tensor | None) -> bool:
    """Whether weight @ x is a linear of the columns of x, as Mamba computes its time steps."""
    return x is not None and x.dim() > 1 and not isinstance(x, SplitWeight)


def split_weights(
    model: nn.Module, weights: list[HostWeight], runner: Runner, undo: ExitStack
) -> None:
    """Have the runner compute the weights' products and hook the modules' calls, until `undo`."""
    for module in model.modules():
        if _has_children(module):
            undo.callback(module.register_forward_pre_hook(runner.enter, prepend=True).remove)
            undo.callback(module.register_forward_hook(runner.leave, always_call=True).remove)
        if hasattr(module, "get_compiled_call"):
            _set_attributes(undo, module, get_compiled_call=partial(_uncompiled, module))
        if type(module).__name__ == FALCON_LINEAR:  # its own multiplies by weight.T
            _set_attributes(undo, module, forward=MethodType(nn.Linear.forward, module))
        if expert_stacks(module):  # the class's own forward takes one expert at a time
            forward = inspect.unwrap(type(module).forward)
            _set_attributes(undo, module, forward=MethodType(forward, module))
    device = runner.compute_device
    for index, weight in enumerate(weights):
        parameter: Any = weight.parameter
        if parameter.dim() == 3:  # it holds all experts of a layer
            if not hasattr(parameter, "experts"):
                _make_split(parameter, undo, compute_device=device, experts=[])
            expert = nn.Parameter(weight.tensor, requires_grad=False)
            parameter.experts.append(expert)
            parameter = expert
        products = Products(runner, index, weight.dim)
        _make_split(parameter, undo, compute_device=device, products=products)


def _uncompiled(module: nn.Module, *_: Any) -> Callable[..., Any]:
    """In place of transformers' method: `generate` would compile, with an error at the lanes."""
    return module.__call__


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _make_split(parameter: Any, undo: ExitStack, **attributes: Any) -> None:
    """Make the parameter a SplitWeight with these attributes, until `undo`."""
    undo.callback(setattr, parameter, "__class__", type(parameter))
    parameter.__class__ = SplitWeight
    _set_attributes(undo, parameter, **attributes)


def _set_attributes(undo: ExitStack, target: Any, **attributes: Any) -> None:
    """Set attributes of an object, until `undo`."""
    for name, value in attributes.items():
        if name in vars(target):
            undo.callback(setattr, target, name, vars(target)[name])
        else:
            undo.callback(delattr, target, name)
        setattr(target, name, value)


def mark_modules(model: nn.Module, undo: ExitStack) -> None:
    """Have all modules refuse what would make resident copies of weights outdated, until `undo`."""
    mark = Uncopyable()
    for module in model.modules():
        _set_attributes(undo, module, **{MARK: mark, "_apply": partial(_refuse_to_convert, module)})
        undo.callback(module.register_load_state_dict_pre_hook(_refuse_to_load).remove)
        if hasattr(module, "resize_token_embeddings"):
            _set_attributes(undo, module, resize_token_embeddings=_refuse_to_resize)


def _refuse_to_resize(*_: Any, **__: Any) -> None:
    raise ValueError(  # `remove` would restore the old embedding beside the new head
        "a split model takes no other number of tokens: call handle.remove() first, and "
        "dispatch_model after resize_token_embeddings"
    )


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    raise ValueError(
        f"{type(module).__name__} is split by dispatch_model and takes no weights: "
        "call handle.remove() first, and dispatch_model after load_state_dict"
    )


def _refuse_to_convert(
    module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """In place of `nn.Module._apply`, which model.to(...) calls: accept what changes no tensor.

    It refuses before any tensor is changed, since a half converted model computes wrong results.
    """
    tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    with torch.no_grad():
        for name, tensor in tensors:
            if convert(tensor) is not tensor:
                raise ValueError(
                    f"a split model is neither moved nor converted, and {name} would be: call "
                    "handle.remove() first"
                )
    return module


def check_not_split(model: nn.Module) -> None:
    """Refuse a model with a module that is split already, or with another model's split weight."""
    if any(hasattr(module, MARK) for module in model.modules()):
        raise ValueError("model is split already, or a part of it: call handle.remove() first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitWeight):
            raise ValueError(
                f"model shares {name} with another model that is split: call the other's "
                "handle.remove() first"
            )


def check_not_called(model: nn.Module) -> None:
    """Refuse to restore a split model while any thread calls it.

    The threads' stacks are searched, since no hook is called when Ctrl-C ends a call. Another
    thread may call a module without children, such as a linear: the runner computes or refuses it.
    """
    split = {module for module in model.modules() if hasattr(module, MARK)}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        is_caller = ident == threading.get_ident()
        called = {module for module in split if is_caller or _has_children(module)}
        for frame, _ in traceback.walk_stack(top):
            if frame.f_code is nn.Module.__call__.__code__ and frame.f_locals["self"] in called:
                raise RuntimeError(
                    "handle.remove() within a call of the model: call it when the call has ended"
                    if is_caller
                    else f"handle.remove() while the thread {names.get(ident)!r} calls the model: "
                    "wait for the end of its call, then call handle.remove() again"
                )
    del top, frame  # the caller's frames, which would refer to themselves and keep the memory
