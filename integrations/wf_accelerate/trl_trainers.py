"""TRL's trainers of preferences and policies (DPO, KTO, GRPO, RLOO) around a spread model.

The rollout is whole: each rank of a sequence generates all of it, and alike. The loss is cut:
log-probabilities of a rank's own tokens are brought together, (b, S), logits never are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.utils import set_seed
from torch import Tensor, nn

from wf_transformers import Handle, attach_model, temporarily_replace
from wf_transformers.whole_batches.log_probabilities import (
    LogProbabilityHooks,
    Rollout,
    take_sharded_logits,
)


class TrlTrainer:
    """What such a trainer needs beside its model's hooks.

    Args:
        trainer: before its model is attached.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._policy = hasattr(trainer, "num_generations")
        reference = getattr(trainer, "ref_model", None)
        self._reference = reference if isinstance(reference, nn.Module) else None
        _refuse(trainer, self._policy or self._reference is not None)
        generates = self._policy or getattr(trainer, "generate_during_eval", False)
        models = [trainer.model, self._reference] if generates else []
        self._rollouts = [Rollout(model) for model in models if model is not None]

    @property
    def others(self) -> list[Any]:
        """Models that the trainer had prepared for evaluation: they are not trained."""
        return [self._reference, *getattr(self._trainer, "reward_funcs", [])]

    def connect(self, handle: Handle) -> None:
        """Have it train the model of `handle`.

        Raises:
            ValueError: if the completions of a prompt would be made by several sequences' ranks.
        """
        trainer, sp = self._trainer, handle.sp
        handle.first = None  # the model is called without labels: no loss of a call to compare
        if self._policy:
            _count_groups(trainer, sp.size, handle)
            set_seed(trainer.args.seed + handle.data_parallel_rank)  # as TRL does by process
            rewards = partial(_of_first_ranks, sp.size)
            handle.undo.enter_context(temporarily_replace(trainer, "_calculate_rewards", rewards))
        if self._reference is not None:
            reference = attach_model(self._reference, sp)
            handle.undo.callback(reference.remove)
            LogProbabilityHooks(self._reference, reference)
        take_sharded_logits(trainer, handle)
        for rollout in self._rollouts:
            rollout.take_over(handle)


def _refuse(trainer: Any, beside: bool) -> None:
    """What ranks of a sequence cannot share.

    Args:
        beside: whether there is a rollout or a reference model.
    """
    if getattr(trainer, "use_vllm", False):
        raise NotImplementedError(
            "use_vllm=True: vLLM would be asked once by every rank of a sequence, and they would "
            "get different completions; leave it out, and the model itself generates"
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise NotImplementedError(
            "use_transformers_continuous_batching=True: its caches cannot be spread; leave it out, "
            "and the model generates as ever"
        )
    if trainer.is_fsdp_enabled and beside:
        raise NotImplementedError(
            f"{type(trainer).__name__} under FSDP: a rollout and a reference model need whole "
            "parameters; run it under DDP"
        )


def _count_groups(trainer: Any, size: int, handle: Handle) -> None:
    """A group's ranks count as one process where prompts are handed out."""
    args, each = trainer.args, trainer.num_generations
    rows = args.per_device_train_batch_size * args.steps_per_generation
    mine = {"per_device_train_batch_size x steps_per_generation": rows}
    if trainer.eval_dataset is not None:
        mine["per_device_eval_batch_size"] = args.per_device_eval_batch_size
    for name, rows in mine.items():
        if rows % each:
            raise ValueError(
                f"{name} = {rows} must be a multiple of num_generations = {each}: the completions "
                "of a prompt are compared with each other, so one sequence's ranks make all"
            )
    handle.set(args, "generation_batch_size", args.generation_batch_size // size)


def _of_first_ranks(
    size: int, original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Rewards that all ranks gathered: those of each sequence's first rank, for all of its ranks.

    A judge may tell each rank another reward.
    """
    from accelerate.state import PartialState

    gathered, world = original(*args, **kwargs), PartialState().num_processes
    by_rank = gathered.unflatten(0, (world // size, size, len(gathered) // world))
    return by_rank[:, :1].expand_as(by_rank).flatten(0, 2)
