"""The options of a config block for the model, besides the fields of SequenceParallelConfig.

{"sequence_parallel_size": 4, "verify": true, "autochunk": {"max_memory": "8GB"},
 "activation_checkpointing": {"offload": true}, "latents": true}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_transformers.attach import send_latents
from wf_transformers.calls import by_name, parameter_names, tokens_of
from wf_transformers.comparison.first_step import FirstStep, InnerCalls
from wf_transformers.comparison.runs import Gather
from wf_transformers.comparison.verify import VERIFY, Mode, check_mode, verify
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.handle import Handle
from wf_transformers.memory.checkpoints import CHECKPOINTING, Checkpointing, checkpoint_activations
from wf_transformers.memory.tiles import AUTOCHUNK, TrainingBudget, apply_tiles, plan_tiles
from wf_transformers.models import outermost

LATENTS = "latents"
MODEL_KEYS = (CHECKPOINTING, AUTOCHUNK, VERIFY, LATENTS)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the model."""

    checkpointing: Checkpointing | None = None
    """What its layers keep for the backward; None: as the model has it."""
    autochunk: TrainingBudget | None = None
    """How much memory a rank's activations may take."""
    verify: Mode = True
    """Whether to compare it with the model on one rank before it trains."""
    latents: bool = False
    """Whether its attention sends latents instead of keys and values."""

    @classmethod
    def split(cls, block: Mapping[str, Any]) -> tuple[dict[str, Any], ModelOptions]:
        """Split a block into (its other fields, the options of the model).

        Raises:
            ValueError: naming an unknown key, or an impossible value.
        """
        others = {key: value for key, value in block.items() if key not in MODEL_KEYS}
        mode = block.get(VERIFY, True)
        check_mode(mode)
        latents = block.get(LATENTS, False)
        if not isinstance(latents, bool):
            raise ValueError(f'"{LATENTS}" must be true or false, got {latents!r}')
        return others, cls(
            Checkpointing.from_dict(block[CHECKPOINTING]) if CHECKPOINTING in block else None,
            TrainingBudget.from_dict(block[AUTOCHUNK]) if AUTOCHUNK in block else None,
            mode,
            latents,
        )

    def attached(
        self,
        model: nn.Module,
        attach: Callable[[], Handle],
        hook: Callable[[Handle], Any] | None = None,
    ) -> Handle:
        """Attach a model as `verify` compares it: with the options that change what its ranks
        send, and with `hook`, which adds hooks."""
        handle = attach()
        with handle.removed_on_error():
            if self.latents:
                send_latents(model, handle)
            if hook is not None:
                hook(handle)
        return handle


def attach_by(
    options: ModelOptions,
    model: nn.Module,
    sp: SequenceParallel,
    attach: Callable[[], Handle],
    labelled: bool = False,
    compares: bool = True,
) -> Handle:
    """Attach a model and apply its options; the handle undoes all of it.

    Args:
        model: not yet attached.
        attach: attaches it, without its options.
        labelled: as in `plan_tiles`.
        compares: whether to compare the model with itself on one rank on its first training batch,
            if `options.verify` is not False.
    """
    plan = plan_tiles(model, options.autochunk, sp.size, labelled, options.checkpointing)
    first_step = FirstStep(model, options.verify if compares else False)
    with first_step.changes.recorded():
        handle = options.attached(model, attach)
        with handle.removed_on_error():
            checkpoint_activations(model, handle, options.checkpointing)
            apply_tiles(model, handle, plan)
            if first_step.due and sp.size > 1:
                InnerCalls(model, handle, first_step)
    handle.first = first_step
    _compare_first_call(model, handle)
    return handle


def attach_compared(
    options: ModelOptions,
    model: nn.Module,
    sp: SequenceParallel,
    attach: Callable[[], Handle],
    hook: Callable[[Handle], Any] | None = None,
    whole_batches: bool = False,
    gather: Gather | None = None,
    compares: bool = True,
    labelled: bool = False,
) -> Handle:
    """Compare a model with itself on one rank on a random batch, then `attach_by`: for all entries.

    Args:
        attach: attaches the model, without its options.
        hook: adds hooks to the attached model for the comparison, such as `WholeBatchHooks`.
        whole_batches, gather: as in `verify`.
        compares, labelled: as in `attach_by`.

    Returns: as `attach_by`. Raises: as `verify`, and what `attach` raises.
    """
    if compares:
        attached = partial(options.attached, model, attach, hook)
        verify(model, sp, attached, options.verify, whole_batches=whole_batches, gather=gather)
    return attach_by(options, model, sp, attach, labelled, compares)


def _compare_first_call(model: nn.Module, handle: Handle) -> None:
    """Compare before the first step of a model that is cut inside; in others hooks do it."""
    names = parameter_names(model)

    @eager
    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not handle.awaits_first:
            return
        arguments = by_name(names, args, kwargs)
        is_pretrained = bool(outermost(model))  # otherwise the arguments are unknown
        is_whole = is_pretrained and (tokens_of(arguments) is None or is_cut_inside(model))
        if is_whole and model.training and torch.is_grad_enabled():
            handle.compare_first(arguments)

    handle.before(model, compare, first=True)
