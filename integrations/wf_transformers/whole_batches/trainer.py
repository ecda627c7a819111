"""Replacements for methods of transformers' Trainer when its model takes whole batches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from transformers.trainer_utils import has_length

from wf_backends.parallel import count_valid
from wf_transformers.comparison.runs import LOSS
from wf_transformers.rng import draw_alike
from wf_transformers.whole_batches.custom_loss import NUM_ITEMS
from wf_transformers.whole_batches.hooks import GROUP_SIZE, WHOLE_LOGITS, WholeBatchHooks
from wf_transformers.whole_batches.loaders import gathering_by_group

COUNTS_ALL = (
    f"{NUM_ITEMS} counts the labels of all processes: a compute_loss that divides by it multiplies "
    "by accelerator.num_processes, as the Trainer's own does; or set "
    "average_tokens_across_devices=False"
)


def loss_only(_: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the Trainer's `prediction_step`: does not gather logits that the Trainer drops."""
    call = inspect.signature(original).bind(*args, **kwargs)
    hooks = hooks_on(call.arguments["model"])
    if call.arguments["prediction_loss_only"] and hooks is not None and not hooks.always_whole:
        call.arguments["inputs"] = {**call.arguments["inputs"], WHOLE_LOGITS: False}
    return original(*call.args, **call.kwargs)


def counted_once(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the Trainer's `compute_loss`: counts a sequence-parallel group as one process.

    Under `average_tokens_across_devices` the Trainer sums the number of labels over all processes
    and multiplies the loss by the number of processes. Losses that are not divided by that number
    of labels would become too large.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    num_items = call.arguments.get(NUM_ITEMS)
    size = _counted_ranks(trainer, call.arguments["model"])
    if size == 1 or num_items is None:
        return original(*args, **kwargs)
    call.arguments[NUM_ITEMS] = num_items // size
    result = original(*call.args, **call.kwargs)
    return (result[0] / size, *result[1:]) if isinstance(result, tuple) else result / size


def inner_loss_counted_once(
    trainer: Any, original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Replaces `compute_loss_func` or `label_smoother` of a Trainer whose `compute_loss` is its
    own, such as TRL's: it multiplies their loss as the Trainer's does; see `counted_once`.

    transformers 4 gives the label smoother no number of labels, and counts them in training alone.
    """
    model, size = trainer.model, 1
    if kwargs.get(NUM_ITEMS) is not None:
        size = _counted_ranks(trainer, model)
        kwargs[NUM_ITEMS] = kwargs[NUM_ITEMS] // size
    elif NUM_ITEMS not in kwargs and model.training:
        size = _counted_ranks(trainer, model)
    return original(*args, **kwargs) / size


def _counted_ranks(trainer: Any, model: nn.Module) -> int:
    """How many ranks with the same batch the Trainer counts in a loss as processes of their own."""
    multiplies = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    sums = trainer.args.average_tokens_across_devices and multiplies
    return _group_size(model) if sums else 1


def _group_size(model: nn.Module) -> int:
    return next((vars(m)[GROUP_SIZE] for m in model.modules() if GROUP_SIZE in vars(m)), 1)


def resuming(trainer: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replaces the Trainer's `_load_rng_state`, which it calls once, when it resumes.

    A job of other ranks saved other random numbers for the ranks of a sequence, or none.
    """
    original(*args, **kwargs)
    size = _group_size(trainer.model)
    if size > 1:
        draw_alike(size, trainer.args.device)
    if trainer.is_world_process_zero():
        warn_of_other_steps(trainer)


def warn_of_other_steps(trainer: Any) -> None:
    """Warn if steps before the checkpoint read another number of samples than those of this job.

    The Trainer skips as many steps of an epoch as were made. With steps of another size it reads
    samples again or leaves some out. A loader without a length does not show the size.
    """
    loader, step = trainer.callback_handler.train_dataloader, trainer.state.global_step
    if trainer.args.ignore_data_skip or not has_length(loader):
        return
    accumulation = trainer.args.gradient_accumulation_steps
    steps_of_same_data = trainer.state.epoch * ceil(len(loader) / accumulation)
    if abs(steps_of_same_data - step) < 1:  # the last step of an epoch may be smaller
        return
    warnings.warn(
        f"{step} steps before the checkpoint read as many samples as {steps_of_same_data:.4g} "
        f"steps of this job. The Trainer skips the samples of {step} steps: it reads samples "
        f"again, or leaves some out. gradient_accumulation_steps={accumulation} would have to be "
        f"{accumulation * steps_of_same_data / step:.4g}; or begin the epoch again, with "
        "ignore_data_skip=True",
        RuntimeWarning,
        stacklevel=2,
    )


def gathered_once(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the Trainer's `evaluation_loop`: before it a Seq2SeqTrainer sets `gather_function`
    to the accelerator's `gather`, which gathers a sample from every rank of its group."""
    gather = trainer.accelerator.gather
    if trainer.gather_function == gather:
        trainer.gather_function = partial(gathering_by_group, trainer.accelerator, gather)
    return original(*args, **kwargs)


def compared_first(
    trainer: Any, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces the Trainer's `training_step`: compares the loss before the first step."""
    hooks = hooks_on(model)
    if hooks is not None and hooks.handle.awaits_first:
        counts_labels = (args[0] if args else kwargs.get(NUM_ITEMS)) is not None
        with _restored_counts(trainer):
            batch = trainer._prepare_inputs(inputs)
            loss = partial(_loss, trainer, hooks, counts_labels)
            try:
                hooks.handle.compare_first(batch, call=loss)
            except NotImplementedError as error:
                if counts_labels and trainer.args.average_tokens_across_devices:
                    error.add_note(COUNTS_ALL)
                raise
    return original(model, inputs, *args, **kwargs)


TRAINER_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "prediction_step": loss_only,
        "compute_loss": counted_once,
        "training_step": compared_first,
        "evaluation_loop": gathered_once,
        "_load_rng_state": resuming,
    }
)
"""Methods of a Trainer, and what replaces them: functions of the trainer, the method and its
arguments."""


def _loss(
    trainer: Any, hooks: WholeBatchHooks, counts_labels: bool, batch: Mapping[str, Any], alone: bool
) -> dict[str, Any]:
    """The loss of a step; `alone`, on one rank, the Trainer must count one process per group."""
    state = trainer.accelerator.state
    num_processes, kwargs = state.num_processes, {}
    state.num_processes = num_processes // hooks.handle.sp.size if alone else num_processes
    if counts_labels:
        ranks = state.num_processes if trainer.args.average_tokens_across_devices else 1
        kwargs[NUM_ITEMS] = ranks * count_valid(batch["labels"])
    try:
        with trainer.compute_loss_context_manager():
            return {LOSS: trainer.compute_loss(hooks.model, dict(batch), **kwargs)}
    finally:
        state.num_processes = num_processes


@contextmanager
def _restored_counts(trainer: Any) -> Iterator[None]:
    """Restore the Trainer's counters and what it keeps for its log."""
    saved = {key: deepcopy(x) for key, x in vars(trainer).items() if _is_plain(x)}
    try:
        yield
    finally:
        vars(trainer).update(saved)


def _is_plain(x: Any) -> bool:
    """Whether `x` consists of numbers, strings, lists, tuples and dicts only."""
    if isinstance(x, list | tuple | dict):
        return all(map(_is_plain, x.values() if isinstance(x, dict) else x))
    return isinstance(x, int | float | str)


def hooks_on(model: nn.Module) -> WholeBatchHooks | None:
    """The hooks of the model, or of a model inside a wrapper."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, WholeBatchHooks)), None)
