"""How any model gets our attention: by transformers' registry, or by a method of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends.dsp import RECEIVER, receivers
from wf_transformers.apply import Application
from wf_transformers.connect import connect_each


@dataclass(slots=True)
class Connection:
    """What was done to a model, and how to undo it."""

    applications: list[Application] = field(default_factory=list)
    """What wf_transformers did, for every Hugging Face model that is not inside another."""
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def application(self) -> Application | None:
        """The first of them; its `checkpoint_kwargs` are those of all."""
        return next(iter(self.applications), None)


def connect_any(model: nn.Module, sp: SequenceParallel) -> Connection:
    """Let the model attend over the ranks of `sp`.

    Every Hugging Face model inside `model` is switched to a name that is registered for `sp`. Every
    other submodule with a method `set_sequence_parallel(sp)` has it called.

    Raises:
        ValueError: if nothing in the model can attend over ranks, and there are several.
        NotImplementedError: for a Hugging Face model that cannot be spread over several.
    """
    attending = receivers(model)
    for receiver in attending:
        getattr(receiver, RECEIVER)(sp)
    if find_pretrained(model) is not None:
        undo = ExitStack()
        return Connection(connect_each(model, sp, undo), undo)
    if sp.size > 1 and not attending:
        raise ValueError(
            f"nothing in {type(model).__name__} attends over ranks: it holds no Hugging Face "
            f"model and no module with a method {RECEIVER}(sp) to give the SequenceParallel to"
        )
    return Connection()


def find_pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The outermost Hugging Face model in `model`, itself included."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
