"""What a user calls: deepspeed.initialize that applies the "wallfacer" block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups as groups_of_deepspeed
from deepspeed.utils import set_z3_leaf_module
from torch import nn

from wf_backends import SequenceParallel
from wf_backends.autochunk.tiling import tiled_modules
from wf_backends.launch import leave_at_exit, refuse_other_value
from wf_deepspeed import cpu
from wf_deepspeed.config import (
    BATCH_KEYS,
    KEY,
    Block,
    check_batch,
    data_parallel_size,
    load_config,
    read_block,
    refuse_conflicts,
    with_batch_size,
)
from wf_deepspeed.handle import WallFacer
from wf_deepspeed.mpu import Groups, NeutralMpu
from wf_deepspeed.saving import make_checkpoints_atomic
from wf_transformers import (
    Handle,
    WholeBatchHooks,
    attach_compared,
    attach_model,
    attach_stages,
    refuse_different,
)

Initialize = Callable[..., tuple[Any, Any, Any, Any]]
CONFIG_ARGUMENTS = ("deepspeed_config", "deepscale_config")
"""Command-line arguments that name the JSON; DeepSpeed still takes the second, an old name."""


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`; takes and returns the same.

    If the configuration has an enabled "wallfacer" block, the engine gets an attribute `wallfacer`
    (a `WallFacer`), a Hugging Face model runs our attention, and the SequenceParallel object is
    passed to the method `set_sequence_parallel` of every submodule that has one. Without the block
    this is deepspeed.initialize.

    Raises:
        ValueError, NotImplementedError: for a wrong block, batch sizes that contradict each other,
            or keys of DeepSpeed that give wrong results together with the block.
    """
    return initialize_with(inspect.unwrap(deepspeed.initialize), args, kwargs)


def initialize_with(
    original: Initialize,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole_batches: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Do what `initialize` does, with `original` instead of deepspeed.initialize.

    Args:
        original: DeepSpeed's own function. args, kwargs: its arguments.
        whole_batches: whether the model will be called with whole batches that have labels.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    config = find_config(call.arguments)
    block = read_block(config)
    if block is None:
        if call.arguments.get("mpu") is None:  # with one, engines may be of some ranks alone
            refuse_missing_block(has_block=False)
        return original(*args, **kwargs)
    refuse_conflicts(config, block)
    _refuse_arguments(call.arguments)
    if block.sequence_parallel.sequence_parallel_size > 1:
        _refuse_dropped_tokens(call.arguments["model"])
    timeout = block.sequence_parallel.timeout
    start(call.arguments, timeout)
    refuse_missing_block(has_block=True)
    block_keys = {f"{KEY}.{key}": value for key, value in config[KEY].items()}
    refuse_different({key: config.get(key) for key in BATCH_KEYS} | block_keys)
    replicas = data_parallel_size(block, dist.get_world_size())
    check_batch(config, replicas)
    block = with_batch_size(block, config, replicas)
    groups = Groups.build(block.sequence_parallel.sequence_parallel_size, timeout)
    sp = SequenceParallel(block.sequence_parallel, group=groups.sequence)
    model = call.arguments["model"]
    handle = _attach(model, sp, block, whole_batches)
    call.arguments["mpu"] = NeutralMpu(groups)
    with handle.removed_on_error(), ExitStack() as stack:
        # DeepSpeed keeps the mpu for the process: every later engine would have ours
        stack.callback(setattr, groups_of_deepspeed, "mpu", groups_of_deepspeed.mpu)
        for module in tiled_modules(model):
            # ZeRO 3 gathers all parameters of a tiled module once per call, not once per tile
            set_z3_leaf_module(module, True)
            handle.undo.callback(set_z3_leaf_module, module, False)
        engine, optimizer, loader, scheduler = original(*call.args, **call.kwargs)
    engine.wallfacer = WallFacer(
        handle, block, groups, engine.device, engine.gradient_accumulation_steps
    )
    engine.dp_world_size = engine.wallfacer.data_parallel_size  # DeepSpeed's is None beside our mpu
    make_checkpoints_atomic(engine, engine.wallfacer)
    return engine, optimizer, loader, scheduler


def refuse_missing_block(has_block: bool) -> None:
    """Check that the neighbours of this rank have a block for this engine, or none, as it has.

    Ranks with a block wait for all others in collectives that DeepSpeed alone does not call.
    """
    if dist.is_initialized():
        topic = f'is the "{KEY}" block of the DeepSpeed config there and enabled'
        refuse_other_value(topic, has_block, range(dist.get_world_size()), dist.get_rank())


def _attach(model: nn.Module, sp: SequenceParallel, block: Block, whole_batches: bool) -> Handle:
    if block.dsp is None:
        attach = partial(attach_model, model, sp)
    else:
        attach = partial(attach_stages, model, sp, block.dsp, block.model.verify)
    partitioned = any(hasattr(p, "ds_id") for p in model.parameters())
    return attach_compared(
        block.model,
        model,
        sp,
        attach,
        hook=partial(WholeBatchHooks, model) if whole_batches else None,
        whole_batches=whole_batches,
        gather=_gathered_parameters if partitioned else None,
        compares=block.dsp is None,  # with DSP the first forward compares
        labelled=sp.size == 1,
    )


def _gathered_parameters(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside, ZeRO 3 has gathered the module's direct parameters, not those of its children.

    Parameters that a module around this one shares with it are gathered already.
    """
    own = [p for p in module.parameters(recurse=False) if not p.numel()]
    return deepspeed.zero.GatheredParameters(own)


def find_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in the arguments of deepspeed.initialize; {} without one."""
    given = [arguments.get(name) for name in ("config", "config_params")]
    given += [getattr(arguments.get("args"), name, None) for name in CONFIG_ARGUMENTS]
    return next((load_config(config) for config in given if config is not None), {})


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    for name in ("mpu", "mesh_param"):
        if arguments.get(name) is not None:
            raise ValueError(
                f'{name}= beside an enabled "{KEY}" block: the block builds the groups '
                f"itself; leave {name} out"
            )
    if isinstance(arguments.get("model"), deepspeed.PipelineModule):
        raise NotImplementedError(
            f'a PipelineModule together with "{KEY}" is not supported; use ZeRO'
        )
    tensor_parallel = init_utils._TP_MODEL_INIT_ARGS  # of the process, for every later engine
    if tensor_parallel is not None and tensor_parallel["tp_size"] > 1:
        raise NotImplementedError(
            f'deepspeed.tp_model_init(tp_size={tensor_parallel["tp_size"]}) together with "{KEY}" '
            "is not supported; remove one"
        )
    if groups_of_deepspeed.mesh_device is not None:  # of the process, like the sizes above
        raise NotImplementedError(
            'an earlier engine with "data_parallel_size" or mesh_param= left its mesh, over which '
            f'DeepSpeed would reduce gradients of "{KEY}" too; make this engine in another process'
        )
    if not isinstance(arguments.get("model"), nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(arguments.get('model'))}")


def _refuse_dropped_tokens(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, TopKGate) and module.drop_tokens:
            raise NotImplementedError(
                f"{name} drops tokens beyond an expert's capacity, which a rank would count for "
                f'its own tokens only beside "{KEY}": give MoE(..., drop_tokens=False)'
            )


def start(
    arguments: Mapping[str, Any] = MappingProxyType({}), timeout: float | None = None
) -> None:
    """Initialise the process group as deepspeed.initialize does; a second call does nothing.

    It also sets this rank's device: the engine sets it later, but the groups need it now.

    Args:
        arguments: of deepspeed.initialize; "distributed_port", "dist_init_required" and the
            device_rank of "args" are used.
        timeout: seconds that ranks wait for each other; None: DeepSpeed's own.
    """
    accelerator = get_accelerator()
    assert accelerator is not None, "DeepSpeed's accelerator is at least the CPU"
    if accelerator.device_name() == "cpu":
        cpu.warn_of_stale_locks()
    names = ("distributed_port", "dist_init_required")
    options = {name: arguments[name] for name in names if name in arguments}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    deepspeed.init_distributed(accelerator.communication_backend_name(), **options)
    leave_at_exit()
    device_rank = getattr(arguments.get("args"), "device_rank", None)
    accelerator.set_device(deepspeed.comm.get_local_rank() if device_rank is None else device_rank)
