"""What a user calls: `connect` for a model and an Accelerator, `connect_trainer` for a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from wf_accelerate.gradients import AveragedGradients
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import own_group
from wf_backends.launch import settle_at_exit
from wf_transformers import (
    MODEL_KEYS,
    Handle,
    ModelOptions,
    WholeBatchHooks,
    attach_compared,
    attach_model,
    counted_by_group,
    refuse_different,
)
from wf_transformers.whole_batches.custom_loss import has_fused_head, has_fused_loss
from wf_transformers.whole_batches.log_probabilities import LogProbabilityHooks, generate_alone
from wf_transformers.whole_batches.trainer import TRAINER_METHODS
from wf_transformers.whole_batches.trl_trainers import (
    attach_reference,
    can_connect_trl,
    connect_trl,
    draw_by_group,
    evaluated_models,
    has_used_loaders,
    is_policy,
    what_generates,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers.trainer import Trainer

Config = SequenceParallelConfig | Mapping[str, Any]
AVERAGING = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
"""accelerate's distributed types that average gradients over all ranks."""


def connect(
    model: nn.Module, accelerator: Accelerator, config: Config, whole_logits: bool = False
) -> Handle:
    """Split the sequences of `model` over the ranks of a job that accelerate runs.

    Call it before `accelerator.prepare`. The model is called with whole batches, as without
    WallFacer. It computes this rank's part, and returns the loss of the whole batch on every rank
    of a group. Loaders that the accelerator prepares give the ranks of a group the same samples;
    `gather_for_metrics` returns each sample once.

    Args:
        model: a Hugging Face model, or a module around one; see `wf_transformers.attach`.
        accelerator: the job's Accelerator, under DDP or FSDP, or in one process.
        config: a SequenceParallelConfig, or a dict of its keys. The dict may also have the keys
            "activation_checkpointing", "autochunk", "latents" and "verify".
        whole_logits: whether a training call with labels returns the logits of the whole batch,
            (b, S, vocabulary) on every rank, instead of those of this rank's tokens.

    Returns:
        The handle; `remove()` undoes all changes.

    Raises:
        ValueError: for a wrong key or value in `config`, a sequence_parallel_size that does not
            divide the number of ranks, an accelerator that does not count all ranks of the job, or
            has already prepared a model or a loader.
        NotImplementedError: for an engine or a parallelism that cannot be combined with ours, and
            for a model that cannot be split, or whose result on the ranks differs from one rank's.
    """
    return _connect(model, accelerator, config, whole_logits)


def _connect(
    model: nn.Module,
    accelerator: Accelerator,
    config: Config,
    whole_logits: bool,
    trl: Trainer | None = None,
) -> Handle:
    """Do what `connect` does; `trl` is the trainer of TRL that trains the model, if one does."""
    refuse_different(config)
    model_options = ModelOptions()
    if not isinstance(config, SequenceParallelConfig):
        block, model_options = ModelOptions.split(config)
        config = SequenceParallelConfig.from_dict(block, MODEL_KEYS)
    _refuse_accelerator(accelerator, trl)
    if "forward" in vars(model) and not (has_fused_head(model) or has_fused_loss(model)):
        raise NotImplementedError(
            f"the forward of this {type(model).__name__} was replaced by {model.forward}, as "
            f"Trainers with a fused loss do: it would compute the loss of this rank's tokens only. "
            'Choose another loss: SFTConfig(loss_type="nll") in TRL 1.7 to 1.14'
        )
    sp = SequenceParallel(config, own_group(config.timeout))
    settle_at_exit()  # Trainers do not destroy the process group that they started
    hooks_class = WholeBatchHooks if trl is None else LogProbabilityHooks
    add_hooks = partial(hooks_class, model, whole_logits=whole_logits)
    attach = partial(attach_model, model, sp)
    handle = attach_compared(model_options, model, sp, attach, add_hooks, whole_batches=True)
    handle.advice = (
        f"all {sp.size} ranks of a sequence read the same samples: have the Accelerator that was "
        f"connected prepare the loader, or shard the data by rank // {sp.size}"
    )
    with handle.removed_on_error():
        add_hooks(handle)
        if accelerator.distributed_type.value != "FSDP":  # parameters are whole
            generate_alone(model, handle, handle.first.changes)
        handle.undo.enter_context(counted_by_group(accelerator, lambda: sp.size))
        if sp.size > 1:
            AveragedGradients(model, accelerator, handle)
    return handle


def connect_trainer(trainer: Trainer, config: Config, whole_logits: bool = False) -> Handle:
    """Do what `connect` does for a transformers Trainer or a subclass. Call it before it trains.

    Args:
        config, whole_logits: as in `connect`. Subclasses may need the logits of training calls.

    Raises:
        ValueError, NotImplementedError: as `connect`, and for a Trainer that builds a new model
            when it trains, or replicates its model over the GPUs of one process.
    """
    _refuse_trainer(trainer)
    trl = trainer if can_connect_trl(trainer) else None
    generating = what_generates(trainer)
    if generating and trainer.is_fsdp_enabled:
        raise NotImplementedError(
            f"{', '.join(generating)} under FSDP: generate needs whole parameters; leave it out, "
            "or train under DDP"
        )
    handle = _connect(trainer.model, trainer.accelerator, config, whole_logits, trl)
    with handle.removed_on_error():
        if trl is not None:
            if is_policy(trainer):
                draw_by_group(trainer, handle.sp.size, handle.undo)
            attach_reference(trainer, handle, whole_logits)
            connect_trl(trainer, handle)
        _replace_steps(trainer, handle)
    # The Trainer holds the accelerator's method as it was before we replaced it
    options = getattr(trainer.gather_function, "keywords", {})
    gather = partial(trainer.accelerator.gather_for_metrics, **options)
    handle.set(trainer, "gather_function", gather)
    return handle


def _refuse_trainer(trainer: Trainer) -> None:
    """Refuse options of a Trainer that cannot be combined with ranks that share samples."""
    if getattr(trainer, "model_init", None) is not None:
        raise NotImplementedError("model_init=: the Trainer makes a new model later; give model=")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process has {trainer.args.n_gpu} GPUs, over which the Trainer would replicate "
            f"the model; start a process for each, torchrun --nproc-per-node {trainer.args.n_gpu}"
        )
    if getattr(trainer.args, "use_legacy_prediction_loop", False):
        raise NotImplementedError(
            "use_legacy_prediction_loop=True would count a sample once for every rank of a "
            "sequence: leave it out"
        )
    if not isinstance(trainer.model, nn.Module):
        raise ValueError(f"the Trainer has no model, got {type(trainer.model)}")


def _replace_steps(trainer: Trainer, handle: Handle) -> None:
    """Replace methods of the Trainer, except a `prediction_step` of a subclass."""
    from transformers.trainer import Trainer

    for name, step in TRAINER_METHODS.items():
        is_own = getattr(type(trainer), name, None) != getattr(Trainer, name)
        if not (name == "prediction_step" and is_own):
            handle.replace(trainer, name, partial(step, trainer))


def _refuse_accelerator(accelerator: Accelerator, trl: Trainer | None) -> None:
    """Refuse an accelerator that does not average gradients over all ranks, or that has prepared a
    loader or a model, unless the trainer `trl` did so when it was made."""
    distributed_type = str(accelerator.distributed_type.value)
    if distributed_type == "DEEPSPEED":
        raise NotImplementedError(
            'accelerate runs DeepSpeed here: put a "wallfacer" block into the DeepSpeed JSON '
            "(deepspeed_config_file of accelerate's configuration, which may have none yet) and "
            "start the script by python -m wf_deepspeed (docs/deepspeed.md)"
        )
    if hasattr(accelerator, "deepspeed_engine_wrapped"):
        raise ValueError(
            "the Accelerator was given a DeepSpeed configuration, which cpu=True leaves out: take "
            "it away, or use DeepSpeed with a block in its JSON (docs/deepspeed.md)"
        )
    if distributed_type not in AVERAGING:
        raise NotImplementedError(
            f"accelerate's distributed_type must be one of {AVERAGING}, got {distributed_type}"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise NotImplementedError(
            f"accelerate's parallelism beside WallFacer's, {parallelism}: leave parallelism_config "
            "out"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"the accelerator counts {accelerator.num_processes} processes, the job has {ranks} "
            f"ranks: gradients would not be averaged. Without GPUs set use_cpu=True in "
            f"TrainingArguments, or Accelerator(cpu=True)"
        )
    allowed_ids = set(map(id, [] if trl is None else evaluated_models(trl)))
    prepared = [model for model in accelerator._models if id(model) not in allowed_ids]
    loaders = accelerator._dataloaders if trl is None or not has_used_loaders(trl) else []
    if prepared or loaders:  # accelerate has no public attributes for them
        raise ValueError(
            "the accelerator has prepared a model or a loader already: connect before "
            "accelerator.prepare, and before the Trainer trains or evaluates. A Trainer that has "
            "prepared them when it was made (TRL's IterativeSFTTrainer) is not supported"
        )
