"""The words "activation_checkpointing" of a block: what a layer's backward starts from, and where.

A checkpointed layer keeps its input alone and computes the rest again in the backward. Switched on
by transformers' own `gradient_checkpointing_enable`; torch's `save_on_cpu` takes the inputs to the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers.modeling_utils import PreTrainedModel

from wf_backends._validation import check_block
from wf_transformers.handle import Handle
from wf_transformers.models import outermost

CHECKPOINTING = "activation_checkpointing"
OFFLOAD = "offload"
RUNNING, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""What transformers sets on modules that have layers to checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Activations are checkpointed: of every layer its input is kept, and nothing else."""

    offload: bool = False
    """Whether these inputs wait in the host's memory."""

    @classmethod
    def from_words(cls, words: Any) -> Checkpointing:
        """What the value of "activation_checkpointing" says.

        Raises:
            ValueError: for a key that there is not, or a value that is neither true nor false.
        """
        check_block(CHECKPOINTING, words, (OFFLOAD,), f'{{"{OFFLOAD}": true}}')
        offload = words.get(OFFLOAD, False)
        if not isinstance(offload, bool):
            raise ValueError(f'"{CHECKPOINTING}.{OFFLOAD}" must be true or false, got {offload!r}')
        return cls(offload)


def checkpoint_activations(model: nn.Module, handle: Handle, wanted: Checkpointing | None) -> None:
    """Checkpoint the layers of every Hugging Face model in `model`, until `handle.remove()`.

    Args:
        model: what `handle` attached.
        wanted: None: everything stays as it is.

    Raises:
        NotImplementedError: if nothing in the model has layers that transformers can checkpoint.
    """
    if wanted is None:
        return
    models = outermost(model)
    for one in models:
        if not one.supports_gradient_checkpointing:
            raise NotImplementedError(_lacks(one))
    if not models:
        raise NotImplementedError(_lacks(model))
    for one in models:
        _enable(one, handle)
        if wanted.offload:
            handle.hooks(one.register_forward_pre_hook(_offload_inputs))


def _lacks(model: nn.Module) -> str:
    return (
        f'"{CHECKPOINTING}" needs a Hugging Face model with gradient checkpointing, and '
        f"{type(model).__name__} is none: leave it out and checkpoint in the model itself, with "
        f"torch.utils.checkpoint inside torch.autograd.graph.save_on_cpu(), or with "
        f'deepspeed.checkpointing and "cpu_checkpointing" of DeepSpeed'
    )


def _enable(model: PreTrainedModel, handle: Handle) -> None:
    """As the user would; what stood in the modules before comes back."""
    for module in model.modules():
        if hasattr(module, RUNNING):
            handle.set(module, RUNNING, True)
            handle.set(module, FUNCTION, None)
    model.gradient_checkpointing_enable(handle.checkpoint_kwargs)


def _offload_inputs(model: nn.Module, _: Any) -> None:
    """Before a forward: whoever enabled checkpointing last, such as a Trainer, had it without."""
    for module in model.modules():
        found = getattr(module, FUNCTION, None)
        if getattr(module, RUNNING, False) and getattr(found, "func", None) is not inputs_on_host:
            setattr(module, FUNCTION, _on_host(found))


def _on_host(checkpoint: Any) -> Callable[..., Any]:
    """The same checkpoint function, with its keywords, and inputs that wait in host memory."""
    if not isinstance(checkpoint, partial):
        return partial(inputs_on_host, checkpoint)
    return partial(inputs_on_host, checkpoint.func, *checkpoint.args, **checkpoint.keywords)


def inputs_on_host(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """checkpoint(*args, **kwargs), of which the tensors that it saves are copied to the host.

    These are the layer's inputs: what is computed inside it, a checkpoint does not save. The
    copies are pinned where there is a GPU.
    """
    with save_on_cpu(pin_memory=True):
        return checkpoint(*args, **kwargs)
