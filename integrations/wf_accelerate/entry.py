"""A model and an Accelerator whose ranks share sequences; see `connect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from wf_accelerate.trl_trainers import TrlTrainer
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import own_group
from wf_backends.launch import settle_at_exit
from wf_transformers import (
    Handle,
    ModelWords,
    WholeBatchHooks,
    attach_compared,
    attach_model,
    compared_first,
    counted_by_group,
    counted_once,
    loss_only,
    temporarily_replace,
)
from wf_transformers.handle import OPERATIONS
from wf_transformers.whole_batches.log_probabilities import (
    LogProbabilityHooks,
    makes_log_probabilities,
)
from wf_transformers.whole_batches.own_loss import has_fused_head

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers.trainer import Trainer

Words = SequenceParallelConfig | Mapping[str, Any]
AVERAGING = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
"""accelerate's distributed types that average gradients over all ranks."""


def connect(
    model: nn.Module, accelerator: Accelerator, words: Words, whole_logits: bool = False
) -> Handle:
    """Spread the sequences of `model` over the ranks of a job that accelerate runs.

    Call it before `accelerator.prepare`. The model is then called with whole batches, as without
    us: it computes this rank's part, and its loss is that of the whole batch on every rank of a
    group. Loaders that the accelerator prepares give the ranks of a group the same samples, and
    `gather_for_metrics` gathers them once.

    Args:
        model: a Hugging Face model, or a module around one; see `wf_transformers.attach`.
        accelerator: the job's, under DDP or FSDP, or in one process.
        words: a SequenceParallelConfig, or its words; these may have "activation_checkpointing",
            "autochunk", "latents" and "verify" among them.
        whole_logits: whether a training call with labels gives the logits of the whole batch too,
            and not of this rank's tokens. (b, S, vocabulary) on every rank.

    Returns:
        What takes all of it back.

    Raises:
        ValueError: for wrong words, a sequence_parallel_size that does not divide the ranks, an
            accelerator that does not know all ranks, or that has prepared something already.
        NotImplementedError: for an engine or a parallelism that cannot go with it, and for a model
            that cannot be spread, or gives something else on the ranks than alone.
    """
    return _connect(model, accelerator, words, whole_logits)


def _connect(
    model: nn.Module,
    accelerator: Accelerator,
    words: Words,
    whole_logits: bool,
    trl: TrlTrainer | None = None,
) -> Handle:
    """`connect`; `trl` is the trainer of TRL around the model."""
    run = ModelWords()
    if not isinstance(words, SequenceParallelConfig):
        own, run = ModelWords.split(words)
        words = SequenceParallelConfig.from_dict(own)
    _refuse(accelerator, [] if trl is None else trl.others)
    if "forward" in vars(model) and not has_fused_head(model):
        raise NotImplementedError(
            f"somebody replaced the forward of this {type(model).__name__} by {model.forward}, as "
            f"Trainers with a fused loss do: that loss would be of this rank's tokens"
        )
    sp = SequenceParallel(words, own_group(words.timeout))
    settle_at_exit()  # Trainers do not destroy the group that they started
    hooks = WholeBatchHooks if trl is None else LogProbabilityHooks
    hook = partial(hooks, model, whole_logits=whole_logits)
    attach = partial(attach_model, model, sp)
    handle, _ = attach_compared(run, model, sp, attach, hook, whole_batches=True)
    handle.advice = (
        f"all {sp.size} ranks of a sequence read the same samples: have the Accelerator that was "
        f"connected prepare the loader, or shard the data by rank // {sp.size}"
    )
    with handle.removed_on_error():
        hook(handle)
        handle.undo.enter_context(counted_by_group(accelerator, lambda: sp.size))
    return handle


def connect_trainer(trainer: Trainer, words: Words, whole_logits: bool = False) -> Handle:
    """`connect` for a Trainer of transformers, or one of its subclasses, before it trains.

    Args:
        whole_logits: for subclasses that look at the logits of training.

    Raises:
        ValueError, NotImplementedError: as `connect`, and for a Trainer that makes its model anew
            or replicates it over the GPUs of one process.
    """
    if getattr(trainer, "model_init", None) is not None:
        raise NotImplementedError("model_init=: the Trainer makes a new model later; give model=")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process has {trainer.args.n_gpu} GPUs, over which the Trainer would replicate "
            f"the model; start a process for each, torchrun --nproc-per-node {trainer.args.n_gpu}"
        )
    if not isinstance(trainer.model, nn.Module):
        raise ValueError(f"the Trainer has no model, got {type(trainer.model)}")
    trl = TrlTrainer(trainer) if makes_log_probabilities(trainer) else None
    handle = _connect(trainer.model, trainer.accelerator, words, whole_logits, trl)
    with handle.removed_on_error():
        if trl is not None:
            trl.connect(handle)
        _replace_steps(trainer, handle)
    options = getattr(trainer.gather_function, "keywords", {})
    gather = partial(trainer.accelerator.gather_for_metrics, **options)
    handle.set(trainer, "gather_function", gather)  # the Trainer keeps what its accelerator had
    return handle


def _replace_steps(trainer: Trainer, handle: Handle) -> None:
    """Methods of transformers' Trainer; those of a subclass's own are left alone."""
    from transformers.trainer import Trainer

    steps = {"prediction_step": loss_only, "compute_loss": partial(counted_once, trainer)}
    for name, step in steps.items():
        if getattr(type(trainer), name, None) is getattr(Trainer, name):
            handle.undo.enter_context(temporarily_replace(trainer, name, step))
    if not hasattr(trainer.model, OPERATIONS):  # of transformers 5, whose Trainer counts itself
        handle.share_operations(trainer)
    first = partial(compared_first, trainer)
    handle.undo.enter_context(temporarily_replace(trainer, "training_step", first))


def _refuse(accelerator: Accelerator, known: Sequence[Any]) -> None:
    """Whatever averages gradients otherwise, or spreads sequences itself.

    Args:
        known: models that it may have prepared.
    """
    kind = str(accelerator.distributed_type.value)
    if kind == "DEEPSPEED":
        raise NotImplementedError(
            'accelerate runs DeepSpeed here: put a "wallfacer" block into the DeepSpeed JSON and '
            "start the script by python -m wf_deepspeed (docs/deepspeed.md)"
        )
    if kind not in AVERAGING:
        raise NotImplementedError(f"accelerate's distributed_type {kind}; have {AVERAGING}")
    own = getattr(accelerator, "parallelism_config", None)
    if own is not None and own.non_data_parallel_size > 1:
        raise NotImplementedError(
            f"accelerate's own parallelism beside ours, {own}: leave parallelism_config out"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"the accelerator counts {accelerator.num_processes} processes, the job has {ranks} "
            f"ranks: gradients would not be averaged. Without GPUs say use_cpu=True in "
            f"TrainingArguments, or Accelerator(cpu=True)"
        )
    models = [one for one in accelerator._models if not any(one is its for its in known)]
    if models or accelerator._dataloaders:  # there is no public word for it
        raise ValueError(
            "the accelerator has prepared a model or a loader already: connect before "
            "accelerator.prepare, and before the Trainer trains or evaluates"
        )
