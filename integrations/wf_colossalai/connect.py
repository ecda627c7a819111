"""One model instance, connected to the ranks that share its sequences. All of it can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from transformers.modeling_utils import PreTrainedModel

import wf_transformers
from wf_backends import SequenceParallel
from wf_backends.dsp import DynamicSequenceParallel, Stages, spread
from wf_colossalai.hooks import TokenHooks, same_inputs
from wf_colossalai.table import AttentionModule, find
from wf_transformers import Application
from wf_transformers.apply import check_asked
from wf_transformers.attention import Attention

OWN_ATTENTION = (
    "no layer of {} called self.wallfacer(...): every rank attended to its own tokens only; give "
    "its row in the table a method that does (docs/colossalai.md)"
)


def connect(
    model: nn.Module,
    sp: SequenceParallel,
    table: Mapping[str, AttentionModule],
    tensor_parallel: ProcessGroup | None = None,
) -> Application:
    """Let `model` take whole batches, compute this rank's part, and attend over the ranks of `sp`.

    Args:
        model: what a booster plugin will wrap, or has cut; it is changed in place.
        sp: the sequence parallelism of this rank.
        table: the attention modules that are known.
        tensor_parallel: the group that the logits may be split over.

    Returns:
        What was done; `application.remove()` undoes it.

    Raises:
        ValueError: if the model's attention is not in the table.
    """
    row = find(model, table)
    pretrained = isinstance(model, PreTrainedModel)
    application = wf_transformers.connect(model, sp) if pretrained else _apply_plain(model, sp)
    for module in model.modules():
        if any(table.get(base.__name__) is row for base in type(module).__mro__):
            _replace_methods(module, row, application)
    if row.cut == "tokens":
        TokenHooks(model, application, row.causal, tensor_parallel)
    else:
        _check_inputs(model, application)
    return application


def connect_stages(model: nn.Module, sp: SequenceParallel, stages: Stages) -> Application:
    """Let `model` switch its hidden state over the ranks of `sp` (DSP); it takes whole inputs.

    Raises:
        ValueError: if the stages do not fit the model.
    """
    application = Application(Attention(sp))
    dsp = DynamicSequenceParallel(sp.comm, gradients="averaged")
    application.undo.callback(spread(model, sp, dsp, stages).remove)
    _check_inputs(model, application)
    return application


def _apply_plain(model: nn.Module, sp: SequenceParallel) -> Application:
    """The scope of a call's documents around a module that transformers knows nothing of."""
    application = Application(Attention(sp))
    attention, documents = application.attention, application.attention.documents

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        documents.push(kwargs.get("cu_seqlens"))
        attention.asked = False
        return args, {k: v for k, v in kwargs.items() if k != "cu_seqlens"}

    def leave(*_: Any) -> None:
        documents.pop()

    check_asked(model, application, OWN_ATTENTION.format(type(model).__name__))
    undo = application.undo
    undo.callback(model.register_forward_pre_hook(enter, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(leave, always_call=True).remove)
    return application


def _replace_methods(module: Any, row: AttentionModule, application: Application) -> None:
    for name, function in row.methods.items():
        module.wallfacer = application.attention
        setattr(module, name, MethodType(function, module))
        application.undo.callback(delattr, module, name)


def _check_inputs(model: nn.Module, application: Application) -> None:
    """Before every forward of a model that every rank gives the whole input."""

    def check(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        same_inputs(application.attention.sp, dict(enumerate_names(args)) | kwargs)

    handle = model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)
    application.undo.callback(handle.remove)


def enumerate_names(args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names for positional arguments: "argument 0", "argument 1", ..."""
    return [(f"argument {index}", value) for index, value in enumerate(args)]
