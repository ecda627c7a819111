"""The option "activation_checkpointing": what layers keep for the backward, and where.

A checkpointed layer keeps its input only and recomputes the rest in the backward. transformers'
`gradient_checkpointing_enable` switches it on; torch's `save_on_cpu` moves the inputs to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from wf_backends._validation import check_block
from wf_transformers.handle import Handle
from wf_transformers.models import outermost
from wf_transformers.replace import set_until

CHECKPOINTING = "activation_checkpointing"
OFFLOAD = "offload"
ENABLED, CHECKPOINT_FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes that transformers sets on modules that have layers to checkpoint."""
OF_WRAPPER = "checkpoint_fn"
"""Where torch's `checkpoint_wrapper` keeps it: the engines' checkpointing of FSDP."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Activations are checkpointed: every layer keeps its input, and nothing else."""

    offload: bool = False
    """Whether these inputs are kept in host memory."""

    @classmethod
    def from_dict(cls, options: Any) -> Checkpointing:
        """From the value of "activation_checkpointing"."""
        check_block(CHECKPOINTING, options, (OFFLOAD,), f'{{"{OFFLOAD}": true}}')
        offload = options.get(OFFLOAD, False)
        if not isinstance(offload, bool):
            raise ValueError(f'"{CHECKPOINTING}.{OFFLOAD}" must be true or false, got {offload!r}')
        return cls(offload)


def checkpoint_activations(
    model: nn.Module, handle: Handle, checkpointing: Checkpointing | None
) -> None:
    """Checkpoint the layers of every Hugging Face model in `model`, until `handle.remove()`."""
    if checkpointing is None:
        return
    models = outermost(model)
    for candidate in models or [model]:
        if not getattr(candidate, "supports_gradient_checkpointing", False):
            raise NotImplementedError(
                f'"{CHECKPOINTING}" needs a Hugging Face model with gradient checkpointing, and '
                f"{type(candidate).__name__} is none: leave it out and checkpoint in the model "
                "itself, with torch.utils.checkpoint inside torch.autograd.graph.save_on_cpu(), "
                'or with deepspeed.checkpointing and "cpu_checkpointing" of DeepSpeed'
            )
    for pretrained in models:
        for module in pretrained.modules():
            if hasattr(module, ENABLED):  # `remove()` restores both
                handle.set(module, ENABLED, True)
                handle.set(module, CHECKPOINT_FUNCTION, None)
        pretrained.gradient_checkpointing_enable(handle.checkpoint_kwargs)
        if checkpointing.offload:
            handle.before(pretrained, _offload_inputs)


def recompute_checkpoints_with_documents(model: nn.Module, handle: Handle) -> None:
    """Let layers that torch's `checkpoint` recomputes know their documents, until `remove()`.

    Called before forwards: engines may set new checkpoint functions after the model is attached.
    Functions with a `context_fn` of the caller's own stay as they are.
    """
    for module in model.modules():
        name = OF_WRAPPER if OF_WRAPPER in vars(module) else CHECKPOINT_FUNCTION
        function = vars(module).get(name)
        if not isinstance(function, partial) or "context_fn" in function.keywords:
            continue
        if checkpoint in (function.func, *function.args):
            handle.set(module, name, partial(function, **handle.checkpoint_kwargs))


def _offload_inputs(model: nn.Module, *_: Any) -> None:
    """Wrap the checkpoint functions before every forward: a Trainer may have set new ones."""
    for module in model.modules():
        function: Any = getattr(module, CHECKPOINT_FUNCTION, None)
        wraps = getattr(function, "func", None) is not inputs_on_host
        if getattr(module, ENABLED, False) and wraps:
            flat = partial(function)  # with the parts of a partial
            wrapped = partial(inputs_on_host, flat.func, *flat.args, **flat.keywords)
            setattr(module, CHECKPOINT_FUNCTION, wrapped)


def inputs_on_host(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """checkpoint(*args, **kwargs), with the tensors that it saves (inputs of its layer) copied to
    host memory, which is pinned if there is a GPU."""
    with save_on_cpu(pin_memory=True):
        return checkpoint(*args, **kwargs)


@contextmanager
def in_planned_training(model: nn.Module, checkpointing: Checkpointing | None) -> Iterator[None]:
    """Inside, all modules train, and a run on fake tensors needs the memory that it will need with
    `checkpointing`."""
    function: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
    if checkpointing is not None and checkpointing.offload:
        function = partial(_inputs_nowhere, function)
    with ExitStack() as stack:
        for module in model.modules():
            set_until(stack, module, "training", True)
            if checkpointing is not None and hasattr(module, ENABLED):
                set_until(stack, module, ENABLED, True)
                set_until(stack, module, CHECKPOINT_FUNCTION, function)
        yield


def _inputs_nowhere(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `inputs_on_host`, for fake tensors, whose device and host may be the same."""

    def as_recipe(x: Tensor) -> Callable[[], Tensor]:
        options = {"dtype": x.dtype, "device": x.device}
        return partial(torch.empty_strided, x.shape, x.stride(), **options)

    with saved_tensors_hooks(as_recipe, lambda recipe: recipe()):
        return checkpoint(*args, **kwargs)
