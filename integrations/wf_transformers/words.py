"""The words of a block that say how the model is run, beside those of SequenceParallelConfig.

{"sequence_parallel_size": 4, "verify": true, "autochunk": {"max_memory": "8GB"},
 "activation_checkpointing": {"offload": true}, "latents": true}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_transformers.attach import take_latents
from wf_transformers.calls import by_name, parameter_names, tokens_of
from wf_transformers.checkpoints import CHECKPOINTING, Checkpointing, checkpoint_activations
from wf_transformers.comparison.first import FirstStep, InnerCalls
from wf_transformers.comparison.runs import Gather
from wf_transformers.comparison.verify import VERIFY, Mode, check_mode, verify
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.handle import Handle
from wf_transformers.models import outermost
from wf_transformers.tiles import AUTOCHUNK, TrainingBudget, apply_tiles, plan_tiles

LATENTS = "latents"
MODEL_WORDS = (CHECKPOINTING, AUTOCHUNK, VERIFY, LATENTS)


@dataclass(frozen=True, slots=True)
class ModelWords:
    """How a model is run."""

    checkpointing: Checkpointing | None = None
    """What is kept of its layers for the backward; None: as the model has it."""
    autochunk: TrainingBudget | None = None
    """What a rank's activations may need."""
    verify: Mode = True
    """Whether it is compared with itself on one rank, before it trains."""
    latents: bool = False
    """Whether latents of its attention travel in place of keys and values."""

    @classmethod
    def split(cls, words: Mapping[str, Any]) -> tuple[dict[str, Any], ModelWords]:
        """The other words of a block, and these.

        Raises:
            ValueError: naming a key that there is not, or a value that cannot be meant.
        """
        others = {key: value for key, value in words.items() if key not in MODEL_WORDS}
        mode = words.get(VERIFY, True)
        check_mode(mode)
        latents = words.get(LATENTS, False)
        if not isinstance(latents, bool):
            raise ValueError(f'"{LATENTS}" must be true or false, got {latents!r}')
        return others, cls(
            Checkpointing.from_words(words[CHECKPOINTING]) if CHECKPOINTING in words else None,
            TrainingBudget.from_words(words[AUTOCHUNK]) if AUTOCHUNK in words else None,
            mode,
            latents,
        )

    def attaching(self, model: nn.Module, attach: Callable[[], Handle]) -> Callable[[], Handle]:
        """What attaches `model` as `attach` does, and has its latents travel if they are to.

        Its handle's model gives what it gives alone, so it is what `verify` compares.
        """

        def attached() -> Handle:
            handle = attach()
            with handle.removed_on_error():
                take_latents(model, handle)
            return handle

        return attached if self.latents else attach


def attach_by(
    words: ModelWords,
    model: nn.Module,
    sp: SequenceParallel,
    attach: Callable[[], Handle],
    labelled: bool = False,
    compares: bool = True,
) -> tuple[Handle, list[nn.Module]]:
    """Attach a model, and have it run as the words say.

    Args:
        model: as it is before it is attached.
        attach: attaches it: what `words.attaching` gives.
        labelled: as that of `plan_tiles`.
        compares: whether it is compared with itself alone on its first batch, if it is verified.

    Returns:
        The handle, which takes all of it back, and the modules that are computed by tiles.

    Raises:
        ValueError, NotImplementedError: as `plan_tiles` and `checkpoint_activations`.
    """
    plan = plan_tiles(model, words.autochunk, sp.size, labelled)
    first = FirstStep(model, words.verify if compares else False)
    with first.changes.recorded():
        handle = attach()
        with handle.removed_on_error():
            checkpoint_activations(model, handle, words.checkpointing)
            tiled = apply_tiles(model, handle, plan)
            if first.due and sp.size > 1:
                InnerCalls(model, handle, first)
    handle.first = first
    _compare_whole_calls(model, handle)
    return handle, tiled


def attach_compared(
    words: ModelWords,
    model: nn.Module,
    sp: SequenceParallel,
    attach: Callable[[], Handle],
    hook: Callable[[Handle], Any] | None = None,
    whole_batches: bool = False,
    gather: Gather | None = None,
    compares: bool = True,
    labelled: bool = False,
) -> tuple[Handle, list[nn.Module]]:
    """Compare a model with itself alone on a drawn batch, then `attach_by`: what all doors do.

    Args:
        attach: attaches it, without what the words say.
        hook: what it is compared under, beside that: its hooks of whole batches.
        whole_batches, gather: as those of `verify`.
        compares, labelled: as those of `attach_by`.

    Returns, Raises: as `attach_by` and `verify`.
    """
    make = words.attaching(model, attach)

    def hooked() -> Handle:
        handle = make()
        if hook is not None:
            with handle.removed_on_error():
                hook(handle)
        return handle

    if compares:
        verify(model, sp, hooked, words.verify, whole_batches=whole_batches, gather=gather)
    return attach_by(words, model, sp, make, labelled, compares)


def _compare_whole_calls(model: nn.Module, handle: Handle) -> None:
    """Before the first step of a model that is cut inside: hooks of whole batches do it else."""
    names = parameter_names(model)

    @eager
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = by_name(names, args, kwargs)
        known = bool(outermost(model))  # else it is not known what the arguments are
        whole = known and (tokens_of(given) is None or is_cut_inside(model))
        if whole and model.training and torch.is_grad_enabled():
            handle.compare_first(given)

    handle.hooks(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
