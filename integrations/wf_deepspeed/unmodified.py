"""Runs scripts that call deepspeed.initialize themselves, by replacing functions while they run.

Only `opened()` replaces functions: `deepspeed.initialize` (accelerate and the Hugging Face Trainer
look it up when they call it), torch's `init_process_group`, the functions through which all ranks
of a sequence-parallel group read the same samples with accelerate (`counted_by_group`), and methods
of the Trainer (`trainers.py`). docs/limits.md lists them.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import nn

from wf_deepspeed.config import BATCH_KEYS, KEY, read_block
from wf_deepspeed.entry import CONFIG_ARGUMENTS, find_config, initialize_with
from wf_deepspeed.handle import WallFacer
from wf_transformers import counted_by_group, temporarily_replace
from wf_transformers.whole_batches.hooks import TAKES_WHOLE
from wf_transformers.whole_batches.log_probabilities import LogProbabilityHooks, generate_alone


@contextmanager
def opened() -> Iterator[None]:
    """In this context, scripts that do not import WallFacer run with the block of their JSON."""
    with ExitStack() as stack:
        stack.enter_context(temporarily_replace(deepspeed, "initialize", _initialize))
        stack.enter_context(temporarily_replace(dist, "init_process_group", _init_process_group))
        if importlib.util.find_spec("accelerate"):
            from accelerate import Accelerator

            from wf_deepspeed.trainers import methods_replaced, sequence_parallel_size

            stack.enter_context(counted_by_group(Accelerator, sequence_parallel_size))
            stack.enter_context(methods_replaced())
        yield


def _init_process_group(
    original: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any
) -> None:
    """Replace torch's init_process_group: a script that calls it gets the group that is there.

    Raises:
        ValueError: for a backend that the group lacks, and for another number of ranks.
    """
    if not dist.is_initialized():
        return original(backend, *args, **kwargs)
    there = dist.get_backend_config()
    if not all(part in there for part in (backend or "").split(",")):
        raise ValueError(
            f"init_process_group({backend!r}): python -m wf_deepspeed has made the process group, "
            f"with {there}, for the devices of this machine; leave the backend out"
        )
    size = kwargs.get("world_size", -1)
    if size not in (-1, dist.get_world_size()):
        raise ValueError(
            f"init_process_group(world_size={size}): the process group is there, with all "
            f"{dist.get_world_size()} ranks of the job; make a smaller one by new_group(ranks)"
        )
    if kwargs.get("timeout") is not None:
        warnings.warn(
            f"init_process_group(timeout={kwargs['timeout']}): the process group is there, with "
            "the timeout of python -m wf_deepspeed --timeout=SECONDS",
            RuntimeWarning,
            stacklevel=3,
        )


def _initialize(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """Replace deepspeed.initialize: apply the block; the model then takes whole batches."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments.update(with_group_batch_size(call.arguments))
    if KEY not in find_config(call.arguments):
        warnings.warn(
            f'the DeepSpeed config has no "{KEY}" block: this engine runs without WallFacer',
            RuntimeWarning,
            stacklevel=3,
        )
    model = call.arguments.get("model")
    earlier = vars(model).get(TAKES_WHOLE) if isinstance(model, nn.Module) else None
    if isinstance(earlier, WallFacer):
        earlier.remove()  # auto_find_batch_size of the Trainer tries again
    engine, optimizer, loader, scheduler = initialize_with(
        original, call.args, call.kwargs, whole_batches=True
    )
    if hasattr(engine, "wallfacer") and engine.wallfacer.block.dsp is None:
        hooks = LogProbabilityHooks(engine.module, engine.wallfacer)
        hooks.whole_without_labels = True  # until a trainer that makes log-probabilities takes it
        generate_alone(engine.module, engine.wallfacer, engine.wallfacer.first.changes)
    return engine, optimizer, loader, scheduler


def with_group_batch_size(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of deepspeed.initialize to replace: train_batch_size is counted by group.

    Trainer and accelerate fill in micro batch x accumulation x world size. Empty if the
    configuration has another train_batch_size, or no block.
    """
    config = find_config(arguments)
    block = read_block(config)
    if block is None or not dist.is_initialized():
        return {}
    sizes = [config.get(key) for key in BATCH_KEYS]
    train, micro, steps = (size if isinstance(size, int) else 0 for size in sizes)  # not "auto"
    if not train or train != micro * steps * dist.get_world_size():
        return {}
    size = block.sequence_parallel.sequence_parallel_size
    corrected_config = config | {"train_batch_size": train // size}
    for name in ("config", "config_params"):
        if arguments.get(name) is not None:
            return {name: corrected_config}
    script_args = copy.copy(arguments["args"])  # DeepSpeed refuses both deepspeed_config and config
    for name in CONFIG_ARGUMENTS:
        if hasattr(script_args, name):
            setattr(script_args, name, None)
    return {"args": script_args, "config": corrected_config}
