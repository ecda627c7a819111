"""What replaces functions of accelerate where groups of ranks are counted (loaders.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from types import MappingProxyType, SimpleNamespace
from typing import Any

import accelerate.data_loader
import accelerate.scheduler
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import recursively_apply
from torch import Tensor

from wf_transformers.replace import set_until, temporarily_replace
from wf_transformers.rng import draw_alike
from wf_transformers.whole_batches.loaders import gathering_by_group

Function = Callable[..., Any]


class Stream(IterableDatasetShard):
    """The samples of a dataset without a length for one group, a "process" of accelerate here.

    The last samples, too few for a batch of every group, are divided evenly. Only the number that
    is missing for that is filled up, by the first samples. accelerate's rank 0 does the same when
    it dispatches batches, accelerate's default; its own IterableDatasetShard fills whole batches.

    Attributes:
        rest: () int64, the number of last samples, 0 if every group has a whole batch of them. In
            shared memory, since a loader's worker may be what reads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rest = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        groups, samples, first = self.num_processes, iter(self.dataset), []
        size = self.batch_size if self.split_batches else self.batch_size * groups
        self.rest.zero_()
        while batch := list(islice(samples, size)):
            first = first or batch[:groups]
            if len(batch) < size:
                if self.drop_last:
                    return
                self.rest.fill_(len(batch))
                batch += islice(cycle(first), -len(batch) % groups)
            share = len(batch) // groups
            yield from batch[self.process_index * share : (self.process_index + 1) * share]


def drop_repeated_samples() -> None:
    """Have `gather_for_metrics` drop the samples that filled up the last batch of a `Stream`.

    Several workers of a loader each have last samples of their own: then nothing is dropped.
    """
    loader: Any = GradientState().active_dataloader
    stream = getattr(loader, "dataset", None)
    if isinstance(stream, Stream) and loader.num_workers < 2:
        loader.remainder = int(stream.rest)


def _prepare_data_loader(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's loader, sharded by group instead of by rank; every rank reads its samples."""
    if kwargs.get("dispatch_batches"):
        raise NotImplementedError(
            "dispatch_batches=True: rank 0 would cut batches by rank, and the ranks of a sequence "
            "need the same samples; leave it out, or set it to False"
        )
    if kwargs["num_processes"] % size:
        raise ValueError(
            f"the accelerator counts {kwargs['num_processes']} processes, and a sequence is on "
            f"{size} ranks: without GPUs call accelerate.PartialState(cpu=True) before "
            "Accelerator(), or set use_cpu=True in TrainingArguments"
        )
    by_group = {
        "num_processes": kwargs["num_processes"] // size,
        "process_index": kwargs["process_index"] // size,
        "dispatch_batches": False,
        "torch_device_mesh": None,  # accelerate would count the ranks of its dimensions instead
    }
    sampler = getattr(args[0], "sampler", None)
    if by_group["num_processes"] == 1 and getattr(sampler, "generator", sampler) is None:
        # It draws torch's numbers, of which the ranks of a job have other ones if it seeds by rank
        by_group["rng_types"] = [*(kwargs.get("rng_types") or []), "torch"]
    with ExitStack() as stack:
        if kwargs.get("dispatch_batches") is None:  # an IterableDataset as if rank 0 dispatched it
            set_until(stack, accelerate.data_loader, "IterableDatasetShard", Stream)
            # else every group would read files of its own, and end after another number of samples
            set_until(stack, accelerate.data_loader, "is_datasets_available", lambda: False)
        # earlier versions of accelerate do not know all of them
        return original(*args, **kwargs | {k: x for k, x in by_group.items() if k in kwargs})


def _gather(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """Gather tensors of all ranks along dim 0, and keep those of the first rank of every group."""
    drop_repeated_samples()
    world = PartialState().num_processes

    def first_of_each_group(x: Tensor) -> Tensor:
        by_rank = x.unflatten(0, (world // size, size, len(x) // world))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(first_of_each_group, original(*args, **kwargs))


def _gather_object(size: int, original: Function, objects: Any, **kwargs: Any) -> Any:
    """`_gather` for lists of objects, which may differ in length."""
    drop_repeated_samples()
    is_first = PartialState().process_index % size == 0
    return original(objects if is_first else [], **kwargs)


def _scheduler(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's scheduler: it makes a step for each process, here for each group."""
    scheduler = original(*args, **kwargs)
    scheduler.step = partial(_step_by_group, size, scheduler.step)
    return scheduler


def _step_by_group(size: int, step: Function, *args: Any, **kwargs: Any) -> None:
    def by_group(state: Function) -> SimpleNamespace:
        return SimpleNamespace(num_processes=state().num_processes // size)

    with temporarily_replace(accelerate.scheduler, "AcceleratorState", by_group):
        step(*args, **kwargs)


def _load_accelerator_state(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's states. Ranks of a group then draw alike: a job of other ranks saved other
    random numbers for them, or none."""
    attributes = original(*args, **kwargs)
    device: Any = PartialState().device
    draw_alike(size, device)
    return attributes


class GroupsAsProcesses:
    """An Accelerator to which a group of ranks with the same samples is one process.

    Attributes:
        num_processes: the number of groups.
        process_index: the number of this rank's group.
    """

    num_processes: int
    process_index: int
    _accelerator: Any
    _size: int

    def __init__(self, accelerator: Any, size: int) -> None:
        vars(self).update(
            _accelerator=accelerator,
            _size=size,
            num_processes=accelerator.num_processes // size,
            process_index=accelerator.process_index // size,
        )

    def gather(self, tensor: Any) -> Any:
        """The tensors of the first rank of every group, along dim 0."""
        return gathering_by_group(self._accelerator, self._accelerator.gather, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum (or "mean", "max") over the groups, whose ranks have equal tensors."""
        reduced = self._accelerator.reduce(tensor, reduction, scale)
        return recursively_apply(self._of_groups, reduced) if reduction == "sum" else reduced

    def _of_groups(self, total: Tensor) -> Tensor:
        is_float = total.is_floating_point()
        return total / self._size if is_float else total // self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accelerator, name, value)


FUNCTIONS: Mapping[str, Mapping[str, Function]] = MappingProxyType(
    {
        "prepare_data_loader": {"prepare_data_loader": _prepare_data_loader},
        "prepare_scheduler": {"AcceleratedScheduler": _scheduler},
        "_prepare_deepspeed": {"AcceleratedScheduler": _scheduler},  # it makes its own
        "load_state": {"load_accelerator_state": _load_accelerator_state},
        "gather_for_metrics": {"gather": _gather, "gather_object": _gather_object},
    }
)
"""Method of an Accelerator -> replacements for functions of accelerate.accelerator inside it."""
