"""What the modules of a split model refuse, and how the runner hears of their calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends.hetegen.runner import Runner, Uncopied
from wf_backends.hetegen.split_weight import SplitWeight

MARK = "_wf_hetegen_split"  # an attribute of modules while they are split, and of the device


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
    for ident, frame in sys._current_frames().items():
        own = ident == threading.get_ident()
        called = {module for module in split if own or any(True for _ in module.children())}
        while frame is not None:
            if frame.f_code is nn.Module.__call__.__code__ and frame.f_locals["self"] in called:
                raise RuntimeError(
                    "handle.remove() within a call of the model: call it when the call has ended"
                    if own
                    else f"handle.remove() while the thread {names.get(ident)!r} calls the model: "
                    "wait for the end of its call, then call handle.remove() again"
                )
            frame = frame.f_back


def mark_modules(model: nn.Module, undo: ExitStack) -> None:
    """Have its modules refuse what would leave copies of old weights in use, until `undo`."""
    mark = Uncopied()
    for module in model.modules():
        added = {MARK: mark, "_apply": partial(_refuse_to_convert, module)}
        for name, value in added.items():
            setattr(module, name, value)
            undo.callback(delattr, module, name)
        undo.callback(module.register_load_state_dict_pre_hook(_refuse_to_load).remove)


def tell_calls(model: nn.Module, runner: Runner, undo: ExitStack) -> None:
    """Have the runner told when modules that hold others are called, until `undo`."""
    for module in model.modules():
        if any(True for _ in module.children()):
            undo.callback(module.register_forward_pre_hook(runner.enter, prepend=True).remove)
            undo.callback(module.register_forward_hook(runner.leave, always_call=True).remove)


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
