"""Replacements for methods of transformers' Trainer when its model takes whole batches."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from math import ceil
from types import MappingProxyType, ModuleType
from typing import Any

import accelerate.utils
from torch import nn
from transformers.trainer_utils import has_length

from wf_backends.parallel import count_valid
from wf_transformers.comparison.runs import LOSS
from wf_transformers.replace import set_until, temporarily_replace
from wf_transformers.rng import draw_alike
from wf_transformers.whole_batches.by_group import FUNCTIONS, GroupsAsProcesses
from wf_transformers.whole_batches.custom_loss import NUM_ITEMS
from wf_transformers.whole_batches.hooks import WHOLE_LOGITS
from wf_transformers.whole_batches.loaders import gathering_by_group, group_size
from wf_transformers.whole_batches.log_probabilities import hooks_on, with_sharded_logits


def loss_only(_: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the Trainer's `prediction_step`: does not gather logits that the Trainer drops."""
    call = inspect.signature(original).bind(*args, **kwargs)
    hooks = hooks_on(call.arguments["model"])
    if call.arguments["prediction_loss_only"] and hooks is not None and not hooks.always_whole:
        call.arguments["inputs"] = {**call.arguments["inputs"], WHOLE_LOGITS: "hidden"}
    return original(*call.args, **call.kwargs)


def counting_groups(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces methods of the Trainer in which it, or a subclass, counts processes: inside, the
    ranks of a sequence count as one.

    The Trainer multiplies a loss by the processes, because it divided by the labels of all of them;
    trainers of TRL gather the rewards of all processes and take their own by `process_index`.
    """
    accelerator = trainer.accelerator
    size = group_size(accelerator)
    if size == 1 or isinstance(accelerator, GroupsAsProcesses):
        return original(*args, **kwargs)
    with ExitStack() as stack:
        set_until(stack, trainer, "accelerator", GroupsAsProcesses(accelerator, size))
        for name, function in FUNCTIONS["gather_for_metrics"].items():
            for module in _modules_that_import(name, type(trainer)):
                replaced = temporarily_replace(module, name, partial(function, size))
                stack.enter_context(replaced)
        return original(*args, **kwargs)


def _modules_that_import(name: str, cls: type) -> list[ModuleType]:
    """The modules of a class and its bases that import accelerate's function `name`."""
    modules = {sys.modules.get(base.__module__) for base in cls.__mro__}
    return [m for m in modules if m and getattr(m, name, None) is getattr(accelerate.utils, name)]


def resuming(trainer: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replaces the Trainer's `_load_rng_state`, which it calls once, when it resumes.

    A job of other ranks saved other random numbers for the ranks of a sequence, or none.
    """
    original(*args, **kwargs)
    size = group_size(trainer.accelerator)
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


def evaluated_by_group(
    trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the Trainer's `evaluation_loop`: before it a Seq2SeqTrainer sets `gather_function`
    to the accelerator's `gather`, which gathers a sample from every rank of its group."""
    gather = trainer.accelerator.gather
    if trainer.gather_function == gather:
        trainer.gather_function = partial(gathering_by_group, trainer.accelerator, gather)
    evaluate = partial(with_sharded_logits, trainer, original)
    return counting_groups(trainer, evaluate, *args, **kwargs)


def shared_operations(trainer: Any, original: Callable[..., float], *args: Any) -> float:
    """Replaces the Trainer's `floating_point_ops` of a batch, which it sums over all ranks."""
    return original(*args) / group_size(trainer.accelerator)


def trained_by_group(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the Trainer's `training_step`: compares the loss before the first step, too."""
    step = partial(with_sharded_logits, trainer, partial(compared_first, trainer, original))
    return counting_groups(trainer, step, *args, **kwargs)


def compared_first(
    trainer: Any, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compare the loss before the first step; then do the step."""
    hooks = hooks_on(model)
    if hooks is not None and hooks.handle.awaits_first:
        counts_labels = (args[0] if args else kwargs.get(NUM_ITEMS)) is not None
        with _restored_counts(trainer):
            batch = trainer._prepare_inputs(inputs)
            loss = partial(_loss, trainer, hooks.model, counts_labels)
            hooks.handle.compare_first(batch, call=loss)
    return original(model, inputs, *args, **kwargs)


TRAINER_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "prediction_step": loss_only,
        "compute_loss": counting_groups,
        "get_batch_samples": counting_groups,
        "training_step": trained_by_group,
        "evaluation_loop": evaluated_by_group,
        "_load_rng_state": resuming,
        "floating_point_ops": shared_operations,
    }
)
"""Methods of a Trainer, and what replaces them: functions of the trainer, the method and its
arguments."""


def _loss(
    trainer: Any, model: nn.Module, counts_labels: bool, batch: Mapping[str, Any], alone: bool
) -> dict[str, Any]:
    """The loss of a step, on the ranks of the sequence or on one."""
    kwargs = {}
    if counts_labels:
        averages = trainer.args.average_tokens_across_devices
        processes = trainer.accelerator.num_processes if averages else 1
        kwargs[NUM_ITEMS] = processes * count_valid(batch["labels"])
    with trainer.compute_loss_context_manager():
        return {LOSS: trainer.compute_loss(model, dict(batch), **kwargs)}


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
