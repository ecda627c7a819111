"""How a model gets our attention: by transformers' registry, or by a method of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import nn
from transformers.modeling_utils import PreTrainedModel

import wf_transformers
from wf_backends import SequenceParallel
from wf_backends.dsp import RECEIVER, receivers
from wf_transformers import Application


@dataclass(slots=True)
class Connection:
    """What was done to a model, and how to undo it."""

    application: Application | None = None
    """What wf_transformers did, for a Hugging Face model; has `checkpoint_kwargs`."""
    undo: ExitStack = field(default_factory=ExitStack)


def connect(model: nn.Module, sp: SequenceParallel) -> Connection:
    """Let the model attend over the ranks of `sp`.

    A Hugging Face model inside `model` is switched to a name that is registered for `sp`. Every
    other submodule with a method `set_sequence_parallel(sp)` has it called.

    Raises:
        ValueError: if nothing in the model can attend over ranks, and there are several.
    """
    attending = receivers(model)
    for receiver in attending:
        getattr(receiver, RECEIVER)(sp)
    pretrained = find_pretrained(model)
    if pretrained is not None:
        application = wf_transformers.connect(pretrained, sp)
        connection = Connection(application)
        connection.undo.callback(application.remove)
        return connection
    if sp.size > 1 and not attending:
        raise ValueError(
            f"nothing in {type(model).__name__} attends over ranks: it holds no Hugging Face "
            f"model and no module with a method {RECEIVER}(sp) to give the SequenceParallel to"
        )
    return Connection()


def find_pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The outermost Hugging Face model in `model`, itself included."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
