"""What a user calls: `attach` for a transformer of diffusers."""

from __future__ import annotations

from typing import Any

from torch import nn

from wf_backends import SequenceParallel
from wf_backends._validation import of_type
from wf_diffusers.families import family_of
from wf_diffusers.hooks import TransformerHooks
from wf_transformers import Handle, counted_by_group
from wf_transformers.entry import SP


def attach(model: nn.Module, sp: SequenceParallel, accelerator: Any = None) -> Handle:
    """Split the tokens of a diffusers transformer over the ranks of `sp`.

    Every rank of a sequence calls the model with the same whole inputs, and gets the whole sample.
    The hooks of the model cut tokens and rotary embeddings where they enter its blocks, and gather
    the rows of all ranks before the sample is assembled. In training every rank computes the same
    loss from the whole sample, and gradients are averaged over all ranks, as data parallelism does.

    Args:
        model: one of the models in `wf_diffusers.families`, with any attention backend.
        accelerator: the job's Accelerator, if there is one: loaders and schedulers that it prepares
            from here on count sequences instead of ranks, as those of `wf_accelerate.connect`.

    Raises:
        NotImplementedError: for another model. At a call of the model, for inputs that cannot be
            cut: an IP-Adapter, most masks, in most models a timestep for each token; and for
            dropout in training.
        ValueError: for a model that is attached already. At a call of the model, if the inputs
            differ between the ranks.
    """
    of_type("sp", sp, SequenceParallel, SP)
    hooked = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    if any(isinstance(owner, TransformerHooks) for owner in hooked):
        raise ValueError("the model is attached already: call handle.remove() before")
    family, handle = family_of(model), Handle(sp)
    handle.advice = (
        f"all {sp.size} ranks of a sequence draw the same noise and read the same data: seed them "
        "alike, and give wf_diffusers.attach the Accelerator before it prepares the loader, or "
        f"shard the data by rank // {sp.size}"
    )
    with handle.removed_on_error():
        if accelerator is not None:
            handle.undo.enter_context(counted_by_group(accelerator, lambda: sp.size))
        TransformerHooks(model, family, handle)
    return handle
