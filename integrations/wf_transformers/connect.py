"""A model that exists already, switched to WallFacer: what the framework doors do with one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends.dsp import receivers
from wf_transformers.apply import Application, apply, attends_alone, unhooked_bert
from wf_transformers.models import asks_registry, outermost
from wf_transformers.registry import Registration, register


def connect(model: Any, sp: SequenceParallel) -> Application:
    """Register `sp` under a free name, switch a Hugging Face model to that name, and apply.

    Returns:
        What `apply` gives; its `remove()` undoes all three.
    """
    registration = register_free(sp)
    with ExitStack() as undo:
        undo.callback(registration.remove)
        application = switch(model, registration)
        application.undo.push(undo.pop_all())
    return application


def connect_each(module: nn.Module, sp: SequenceParallel, undo: ExitStack) -> list[Application]:
    """`connect` for every outermost Hugging Face model in `module`, under one name.

    One name, because models may share a config, which is where their name stands.

    Args:
        undo: gets what undoes the registration and every application, which can also be
            removed one by one.

    Raises:
        NotImplementedError: on several ranks, for a model that asks no registry.
    """
    models = outermost(module)
    for model in models:
        if sp.size > 1 and not _can_ask(model):
            raise NotImplementedError(attends_alone(model))
    with ExitStack() as so_far:
        registration = so_far.enter_context(register_free(sp))
        made = [so_far.enter_context(switch(model, registration)) for model in models]
        undo.push(so_far.pop_all())
    return made


def _can_ask(model: PreTrainedModel) -> bool:
    """Whether a layer of the model may ask us: by the registry, by what we replace, by itself."""
    return asks_registry(model) or any(unhooked_bert(model)) or bool(receivers(model))


def register_free(sp: SequenceParallel) -> Registration:
    """`register` under a name that no other model of this process has."""
    return register(sp, _free_name())


def switch(model: Any, registration: Registration) -> Application:
    """Switch a Hugging Face model to the name of a registration, and apply; undone together."""
    with ExitStack() as undo:
        _set_name(model, registration.name, undo)
        application = apply(model, registration.attention.sp)
        application.undo.push(undo.pop_all())
    return application


def _free_name() -> str:
    """ "wallfacer", or with a number if another model of this process has it."""
    name, number = "wallfacer", 1
    while name in ALL_ATTENTION_FUNCTIONS:
        number += 1
        name = f"wallfacer_{number}"
    return name


def _set_name(model: Any, name: str, undo: ExitStack) -> None:
    if hasattr(model, "set_attn_implementation"):  # transformers 5
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(name)
        return
    # GPT-2 of transformers 4 keeps a copy of its config's choice
    copies = (module for module in model.modules() if "_attn_implementation" in vars(module))
    for holder in (model.config, *copies):
        undo.callback(setattr, holder, "_attn_implementation", holder._attn_implementation)
        holder._attn_implementation = name
