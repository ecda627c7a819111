"""TRL's trainers of preferences and policies (DPO, KTO, GRPO, RLOO) with a model on many ranks.

Rollouts are not split: every rank of a sequence generates the same whole completions. The loss is
split: a rank computes the log-probabilities of its tokens, which are gathered to (b, S). Logits are
never gathered.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import set_seed
from torch import nn

from wf_transformers.comparison.changes import Changes
from wf_transformers.entry import attach_model
from wf_transformers.handle import Handle
from wf_transformers.replace import set_until
from wf_transformers.whole_batches.log_probabilities import (
    LogProbabilityHooks,
    generate_alone,
    makes_log_probabilities,
    take_sharded_logits,
)

TABLES = ("_logs", "_textual_logs")
"""Attributes of a policy's trainer: its table of completions, in TRL 1.16 and in TRL 0.19."""
GENERATES = "unwrap_model_for_generation"
"""TRL's function that the files of trainers with rollouts import."""


def evaluated_models(trainer: Any) -> list[Any]:
    """Models that are not trained; the trainer has the accelerator prepare them at once."""
    return [reference_of(trainer), *getattr(trainer, "reward_funcs", [])]


def reference_of(trainer: Any) -> nn.Module | None:
    reference = getattr(trainer, "ref_model", None)
    return reference if isinstance(reference, nn.Module) else None


def has_used_loaders(trainer: Any) -> bool:
    """Whether the trainer, when it was made, read its datasets for the reference's
    log-probabilities, by loaders that it does not use again (TRL 1.16)."""
    return bool(getattr(trainer.args, "precompute_ref_log_probs", False))


def is_policy(trainer: Any) -> bool:
    """Whether a trainer of `connect_trl` generates what it trains on (GRPO, RLOO)."""
    return hasattr(trainer, "num_generations")


def connect_trl(trainer: Any, handle: Handle) -> None:
    """Make a trainer train the model of `handle`, which has `LogProbabilityHooks`."""
    if handle.averages_tokens:
        raise NotImplementedError(
            f'"loss_average": "token" with {type(trainer).__name__}, which computes a loss of its '
            "own from log-probabilities: leave it out"
        )
    handle.first = None  # the model is called without labels, so there is no loss to compare
    if is_policy(trainer):
        evaluated = partial(_with_whole_prompts, trainer.args, handle.sp.size)
        handle.replace(trainer, "evaluation_loop", evaluated)
    take_sharded_logits(trainer, handle)


def attach_reference(trainer: Any, handle: Handle, whole_logits: bool) -> None:
    """Attach the reference model of a trainer, if it has one, to the ranks of `handle`."""
    reference = reference_of(trainer)
    if reference is not None:
        changes = Changes(reference)
        with changes.recorded():
            attached = attach_model(reference, handle.sp)
            handle.undo.callback(attached.remove)
            LogProbabilityHooks(reference, attached, whole_logits)
        generate_alone(reference, handle, changes)


def draw_by_group(trainer: Any, size: int, undo: ExitStack) -> None:
    """Make the ranks of a sequence draw the same prompts and completions: `set_generation_batch`,
    and one seed for each group, where TRL has one for each process."""
    set_generation_batch(trainer, size, undo)
    set_seed(trainer.args.seed + PartialState().process_index // size)


def what_generates(trainer: Any) -> list[str]:
    """What calls `generate` of a trainer's models: options, and callbacks that have a
    `generation_config`, as TRL's LogCompletionsCallback and WinRateCallback."""
    callbacks = trainer.callback_handler.callbacks
    names = [type(x).__name__ for x in callbacks if hasattr(x, "generation_config")]
    if getattr(trainer.args, "predict_with_generate", False):
        names.append("predict_with_generate=True")
    options = ("num_generations", "generate_during_eval")  # of TRL
    return names + [name for name in options if getattr(trainer, name, False)]


def can_connect_trl(trainer: Any) -> bool:
    """Whether a trainer is one for `connect_trl`, whose loss is made of log-probabilities.

    Raises:
        NotImplementedError: for options of such a trainer, and for other trainers, that do not work
            when ranks share a sequence.
    """
    if makes_log_probabilities(trainer):
        _refuse_options(trainer)
        return True
    _refuse_rollouts(trainer)
    return False


def _refuse_rollouts(trainer: Any) -> None:
    """Refuse a trainer of TRL that generates as it trains, other than those of
    `connect_trl`: its model would be called with a KV cache, and its teacher with whole batches."""
    files = (cls.__module__ for cls in type(trainer).__mro__)
    if any(f.startswith("trl.") and hasattr(sys.modules.get(f), GENERATES) for f in files):
        raise NotImplementedError(
            f"{type(trainer).__name__} generates completions in training, with its model or a "
            "teacher, in a way that is not known here: of TRL's trainers that do, GRPOTrainer and "
            "the RLOOTrainer of TRL 1.16 are supported"
        )


def _refuse_options(trainer: Any) -> None:
    if getattr(trainer, "use_vllm", False):
        raise NotImplementedError(
            "use_vllm=True: every rank of a sequence would call vLLM, and get other completions "
            "than the other ranks; leave it out, and the model itself generates"
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise NotImplementedError(
            "use_transformers_continuous_batching=True: its caches cannot be split over ranks; "
            "leave it out, and the model generates without it"
        )
    if trainer.is_fsdp_enabled and reference_of(trainer) is not None:
        raise NotImplementedError(
            f"{type(trainer).__name__} under FSDP: a reference model needs whole parameters; run "
            "it under DDP"
        )


def set_generation_batch(trainer: Any, size: int, undo: ExitStack) -> None:
    """Divide TRL's generation batch by the ranks of a sequence, which generate the same samples,
    until `undo` closes."""
    args = trainer.args
    samples = args.generation_batch_size // size
    name = "per_device_train_batch_size x steps_per_generation"
    _refuse_incomplete_prompts(name, samples, "num_generations", args.num_generations)
    if trainer.eval_dataset is not None:
        _refuse_incomplete_evaluation(args, size)
    set_until(undo, args, "generation_batch_size", samples)
    for name in TABLES:
        if hasattr(trainer, name):
            columns = {key: _column(x, samples) for key, x in getattr(trainer, name).items()}
            set_until(undo, trainer, name, columns)


def _column(column: Any, samples: int) -> Any:
    """An empty column of a trainer's table of completions, which keeps the last `samples`; or,
    as one is for each reward, an empty dict of such columns."""
    make = partial(deque[Any], maxlen=samples)
    return defaultdict(make) if isinstance(column, dict) else make()


def _with_whole_prompts(
    args: Any, size: int, original: Callable[..., Any], *evaluated: Any, **options: Any
) -> Any:
    """Replaces `evaluation_loop` of a policy: the data may be other than at its connection."""
    _refuse_incomplete_evaluation(args, size)
    return original(*evaluated, **options)


def _refuse_incomplete_evaluation(args: Any, size: int) -> None:
    key = "num_generations_eval"  # TRL 0.19 has no such option
    key = key if getattr(args, key, None) else "num_generations"
    samples = args.per_device_eval_batch_size * (PartialState().num_processes // size)
    name = "per_device_eval_batch_size"
    _refuse_incomplete_prompts(name, samples, key, getattr(args, key))


def _refuse_incomplete_prompts(name: str, samples: int, key: str, generations: int) -> None:
    if samples % generations:
        raise ValueError(
            f"{name} x (ranks / sequence_parallel_size) = {samples} must be a multiple of "
            f"{key} = {generations}: a batch has all completions of a prompt"
        )
