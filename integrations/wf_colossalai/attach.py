"""Attaches one model to the ranks that share its sequences; the handle undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import nn
from torch.distributed import ProcessGroup

from wf_backends import SequenceParallel
from wf_backends.dsp import Mode, Stages
from wf_colossalai.hooks import TokenHooks
from wf_colossalai.pipeline import Stage
from wf_colossalai.table import AttentionModule, find
from wf_transformers import (
    Handle,
    attach_pretrained,
    attach_stages,
    outermost,
    scope_documents,
    without_documents,
)
from wf_transformers.whole_batches.heads import HeadHooks, head_is_over_all_rows

OWN_ATTENTION = (
    "no layer of {} called self.wallfacer(...): every rank attended to its own tokens only; give "
    "its row in the table a method that does (docs/colossalai.md)"
)
SAME_SAMPLES = (
    "All ranks of a sequence-parallel group read the same samples: use prepare_dataloader of "
    "WallFacerPlugin, or of what wf_colossalai.apply returned"
)


def attach(
    model: nn.Module,
    sp: SequenceParallel,
    table: Mapping[str, AttentionModule],
    tensor_parallel: ProcessGroup | None = None,
    stages: PipelineStageManager | None = None,
) -> Handle:
    """Make `model` take whole batches, compute this rank's part, and attend over the ranks of `sp`.

    Args:
        model: before a booster plugin wraps it; it may be a pipeline stage, or split by tensor
            parallelism. It is changed in place.
        sp: the sequence parallelism of this rank.
        table: the known attention modules.
        tensor_parallel: the group over which logits may be split.
        stages: the pipeline of which `model` is a stage, if any.
    """
    row = find(model, table)
    if head_is_over_all_rows(model) and outermost(model) != [model]:
        raise NotImplementedError(
            f"{type(model).__name__} around a model with another head than a language model's is "
            "not supported: PEFT calls such a model past its hooks"
        )
    if outermost(model):  # `model` itself, or inside PEFT's
        handle = attach_pretrained(model, sp)
    else:  # its layers must call `self.wallfacer`
        handle = Handle(sp)
        not_called = OWN_ATTENTION.format(type(model).__name__)
        scope_documents(model, handle, without_documents, not_called)
    handle.advice = SAME_SAMPLES
    with handle.removed_on_error():
        for module in model.modules():
            if any(table.get(base.__name__) is row for base in type(module).__mro__):
                for name, function in row.methods.items():
                    handle.set(module, "wallfacer", handle.attention)
                    handle.set(module, name, MethodType(function, module))
        if head_is_over_all_rows(model):
            is_last = stages.is_last_stage if stages else lambda: True
            HeadHooks(model, handle, is_last)  # type: ignore[arg-type]
        elif row.cut == "tokens":
            TokenHooks(model, handle, row.causal, tensor_parallel)
        if stages is not None:
            Stage(model, stages, handle)
    return handle


def attach_whole(
    model: nn.Module, sp: SequenceParallel, stages: Stages, verify: Mode = True
) -> Handle:
    """Make `model` take whole inputs and switch the split dimension of its hidden state (DSP).

    Every forward checks that all ranks have the same inputs. `verify` says whether the first one is
    compared with a forward on one rank.
    """
    handle = attach_stages(model, sp, stages, verify)
    handle.advice = SAME_SAMPLES

    def check_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positional = {f"argument {index}": value for index, value in enumerate(args)}
        with handle.advising():
            handle.sp.check_same(positional | kwargs)

    handle.before(model, check_inputs, first=True)
    return handle
