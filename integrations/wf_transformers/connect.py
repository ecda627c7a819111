"""A model that exists already, switched to WallFacer: what the framework doors do with one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wf_backends import SequenceParallel
from wf_transformers.apply import Application, apply
from wf_transformers.registry import register


def connect(model: Any, sp: SequenceParallel) -> Application:
    """Register `sp` under a free name, switch a Hugging Face model to that name, and apply.

    Returns:
        What `apply` gives; its `remove()` undoes all three.
    """
    registration = register(sp, _free_name())
    with ExitStack() as undo:
        undo.callback(registration.remove)
        _switch(model, registration.name, undo)
        application = apply(model, sp)
        application.undo.push(undo.pop_all())
    return application


def _free_name() -> str:
    """ "wallfacer", or with a number if another model of this process has it."""
    name, number = "wallfacer", 1
    while name in ALL_ATTENTION_FUNCTIONS:
        number += 1
        name = f"wallfacer_{number}"
    return name


def _switch(model: Any, name: str, undo: ExitStack) -> None:
    if hasattr(model, "set_attn_implementation"):  # transformers 5
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(name)
        return
    # GPT-2 of transformers 4 keeps a copy of its config's choice
    copies = (module for module in model.modules() if "_attn_implementation" in vars(module))
    for holder in (model.config, *copies):
        undo.callback(setattr, holder, "_attn_implementation", holder._attn_implementation)
        holder._attn_implementation = name
