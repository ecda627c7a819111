"""Makes accelerate's loaders, schedulers and gathers count groups of ranks instead of ranks.

The ranks of a group have the same samples. accelerate has no setting for such groups except its own
parallelisms. So while methods of its Accelerator or a scheduler's `step` run, the functions that
they call are replaced by functions that count groups. This is the only place that does so;
docs/limits.md lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor

from wf_transformers.replace import set_until, temporarily_replace

Function = Callable[..., Any]
GROUPS = "wallfacer_groups"  # attribute of an Accelerator, or of the class: its `GroupSizes`


@dataclass(frozen=True)
class GroupSizes:
    """Who needs the replaced methods of one Accelerator, or of the class.

    Attributes:
        sizes: for every connected model a function that returns the number of ranks in a group.
        undo: puts the methods back, after the last model is removed.
    """

    sizes: list[Callable[[], int]]
    undo: ExitStack


@contextmanager
def counted_by_group(owner: Any, size: Callable[[], int]) -> Iterator[None]:
    """Inside, an Accelerator's loaders give all ranks of a group the same samples, and its gathers
    return each sample once.

    Args:
        owner: an Accelerator, or the class for all of them.
        size: returns the number of ranks in a group of consecutive ranks; called every time.

    Raises:
        ValueError: if they count groups of another size already (another model was connected).
    """
    groups: GroupSizes = getattr(owner, GROUPS, None) or _replace_methods(owner)
    if groups.sizes and groups.sizes[0]() != size():
        raise ValueError(
            f"sequence_parallel_size {size()} beside {groups.sizes[0]()} of a model that was "
            f"connected earlier: the loaders of one Accelerator serve groups of one size"
        )
    groups.sizes.append(size)
    try:
        yield
    finally:
        groups.sizes.remove(size)
        if not groups.sizes:
            groups.undo.close()


def _replace_methods(owner: Any) -> GroupSizes:
    groups = GroupSizes([], ExitStack())
    set_until(groups.undo, owner, GROUPS, groups)
    for method, functions in FUNCTIONS.items():
        run = partial(_run, functions, groups.sizes)
        groups.undo.enter_context(temporarily_replace(owner, method, run))
    return groups


def _run(
    functions: Mapping[str, Function],
    sizes: list[Callable[[], int]],
    method: Function,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of an Accelerator, with `functions` in place of those of its module."""
    import accelerate.accelerator

    ranks = sizes[0]()
    with ExitStack() as stack:
        for name, function in functions.items() if ranks > 1 else ():
            by_group = partial(function, ranks)
            stack.enter_context(temporarily_replace(accelerate.accelerator, name, by_group))
        for x in args:  # accelerate divides by the processes, where groups are meant
            if type(x).__name__ == "DummyScheduler" and x.total_num_steps is not None:
                set_until(stack, x, "total_num_steps", x.total_num_steps * ranks)
        return method(*args, **kwargs)


def gathering_by_group(accelerator: Any, method: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a method; what it gathers by `accelerator` has the samples of every group once."""
    functions = FUNCTIONS["gather_for_metrics"]
    return _run(functions, getattr(accelerator, GROUPS).sizes, method, *args, **kwargs)


def _prepare_data_loader(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's loader, sharded by group instead of by rank; every rank reads its samples."""
    import accelerate.data_loader

    from wf_transformers.whole_batches.streams import Stream

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
        # It draws torch's numbers, which load_state restores on the ranks that were saved alone
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
    from accelerate.state import PartialState
    from accelerate.utils import recursively_apply

    from wf_transformers.whole_batches.streams import drop_repeated_samples

    drop_repeated_samples()
    world = PartialState().num_processes

    def first_of_each_group(x: Tensor) -> Tensor:
        by_rank = x.unflatten(0, (world // size, size, len(x) // world))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(first_of_each_group, original(*args, **kwargs))


def _gather_object(size: int, original: Function, objects: Any, **kwargs: Any) -> Any:
    """`_gather` for lists of objects, which may differ in length."""
    from accelerate.state import PartialState

    from wf_transformers.whole_batches.streams import drop_repeated_samples

    drop_repeated_samples()
    is_first = PartialState().process_index % size == 0
    return original(objects if is_first else [], **kwargs)


def _scheduler(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's scheduler: it makes a step for each process, here for each group."""
    scheduler = original(*args, **kwargs)
    scheduler.step = partial(_step_by_group, size, scheduler.step)
    return scheduler


def _step_by_group(size: int, step: Function, *args: Any, **kwargs: Any) -> None:
    import accelerate.scheduler

    def by_group(state: Function) -> SimpleNamespace:
        return SimpleNamespace(num_processes=state().num_processes // size)

    with temporarily_replace(accelerate.scheduler, "AcceleratorState", by_group):
        step(*args, **kwargs)


FUNCTIONS: Mapping[str, Mapping[str, Function]] = MappingProxyType(
    {
        "prepare_data_loader": {"prepare_data_loader": _prepare_data_loader},
        "prepare_scheduler": {"AcceleratedScheduler": _scheduler},
        "_prepare_deepspeed": {"AcceleratedScheduler": _scheduler},  # it makes its own
        "gather_for_metrics": {"gather": _gather, "gather_object": _gather_object},
    }
)
"""Method of an Accelerator -> replacements for functions of accelerate.accelerator inside it."""
