"""Methods of transformers' Trainer under the block, for scripts that do not import WallFacer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from transformers.trainer import Trainer

from wf_deepspeed.config import KEY, load_config, read_block
from wf_transformers.replace import temporarily_replace
from wf_transformers.whole_batches.log_probabilities import hooks_on, makes_log_probabilities
from wf_transformers.whole_batches.trainer import (
    TRAINER_METHODS,
    evaluated_by_group,
    trained_by_group,
)
from wf_transformers.whole_batches.trl_trainers import (
    can_connect_trl,
    connect_trl,
    draw_by_group,
    is_policy,
    reference_of,
)


@contextmanager
def methods_replaced() -> Iterator[None]:
    """Inside, METHODS replace those of the Trainer's class."""
    with ExitStack() as stack:
        for name, function in METHODS.items():
            by_class = partial(_on_class, function)
            stack.enter_context(temporarily_replace(Trainer, name, by_class))
        yield


def sequence_parallel_size() -> int:
    """Read sequence_parallel_size of accelerate's DeepSpeed configuration; 1 without a block."""
    plugin = AcceleratorState().deepspeed_plugin
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            f'Accelerator(cpu=True) leaves out DeepSpeed, and the "{KEY}" block of its JSON with '
            "it: on CPUs call accelerate.PartialState(cpu=True) and then Accelerator(), without "
            "cpu=True and without ACCELERATE_USE_CPU"
        )
    config = getattr(plugin, "deepspeed_config", None) or {}
    block = read_block(load_config(config)) if KEY in config else None
    return block.sequence_parallel.sequence_parallel_size if block else 1


def _on_class(function: Any, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, which replaces a method of one Trainer, for a method of the class."""
    return function(trainer, partial(original, trainer), *args, **kwargs)


def _train(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `train`: the ranks of a sequence draw the same prompts and completions of a policy
    of TRL, from its loader on, which comes before the engine."""
    size = sequence_parallel_size()
    if size == 1 or not can_connect_trl(trainer):
        return original(*args, **kwargs)
    with ExitStack() as undo:
        if is_policy(trainer):
            draw_by_group(trainer, size, undo)
        reference = reference_of(trainer)
        hooks = None if reference is None else hooks_on(reference)
        if hooks is not None:
            hooks.whole_without_labels = False
        return original(*args, **kwargs)


def _create_optimizer(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `create_optimizer_and_scheduler`, which the RLOO and PPO of TRL 0.19 call when they
    are made: their `train` is their own."""
    if sequence_parallel_size() > 1:
        can_connect_trl(trainer)
    return original(*args, **kwargs)


def _training_step(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `training_step`: connects a trainer of TRL first."""
    _connect_once(trainer)
    return trained_by_group(trainer, original, *args, **kwargs)


def _evaluation_loop(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `evaluation_loop`: connects a trainer of TRL first."""
    _connect_once(trainer)
    if sequence_parallel_size() > 1 and hooks_on(trainer.model) is None and is_policy(trainer):
        raise NotImplementedError(
            f"{type(trainer).__name__}.evaluate() before train(): every rank of a sequence would "
            "generate other completions; to evaluate before the first step set eval_on_start=True"
        )
    return evaluated_by_group(trainer, original, *args, **kwargs)


def _connect_once(trainer: Any) -> None:
    """Connect a trainer of TRL to the model that its engine attached, unless it is."""
    hooks = hooks_on(trainer.model)
    if hooks is None or hooks.handle.sp.size == 1 or not hooks.whole_without_labels:
        return
    if makes_log_probabilities(trainer):
        hooks.whole_without_labels = False
        connect_trl(trainer, hooks.handle)


METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **TRAINER_METHODS,
        "train": _train,
        "create_optimizer_and_scheduler": _create_optimizer,
        "training_step": _training_step,
        "evaluation_loop": _evaluation_loop,
    }
)
"""Methods of the Trainer, and what replaces them; see TRAINER_METHODS."""
