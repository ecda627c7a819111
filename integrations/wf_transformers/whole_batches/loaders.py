"""accelerate's loaders and gathers, counted by groups of ranks that hold the same samples.

accelerate has no setting for such groups but its own parallelisms. Two methods of its Accelerator
call functions that are told of processes, or ask all of them; while one of the methods runs, its
functions are told of groups. This is the one place where that is done; docs/limits.md lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from wf_transformers.replace import temporarily_replace

Function = Callable[..., Any]


@contextmanager
def counted_by_group(owner: Any, size: Callable[[], int]) -> Iterator[None]:
    """Inside, an Accelerator's loaders give a group's ranks the same samples, and it gathers these
    once.

    Args:
        owner: an Accelerator, or the class for all of them.
        size: the ranks of a group, consecutive ones; asked for at every call.
    """
    with ExitStack() as stack:
        for method, functions in FUNCTIONS.items():
            stack.enter_context(temporarily_replace(owner, method, partial(_run, functions, size)))
        yield


def _run(
    functions: Mapping[str, Function],
    size: Callable[[], int],
    method: Function,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A method of an Accelerator, with `functions` for those of its module."""
    import accelerate.accelerator

    ranks = size()
    with ExitStack() as stack:
        for name, function in functions.items() if ranks > 1 else ():
            by_group = partial(function, ranks)
            stack.enter_context(temporarily_replace(accelerate.accelerator, name, by_group))
        return method(*args, **kwargs)


def _prepare_data_loader(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """accelerate's loader, sharded by group instead of by rank; every rank reads for itself."""
    if kwargs.get("dispatch_batches"):
        raise NotImplementedError(
            "dispatch_batches=True: rank 0 would cut batches by rank, and the ranks of a sequence "
            "need the same samples; leave it out, or set it to False"
        )
    by_group = {
        "num_processes": kwargs["num_processes"] // size,
        "process_index": kwargs["process_index"] // size,
        "dispatch_batches": False,  # None is True for an IterableDataset
    }
    return original(*args, **kwargs | by_group)


def _gather(size: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    """What the first rank of every group has, of tensors that all ranks gathered along dim 0."""
    from accelerate.state import PartialState
    from accelerate.utils import recursively_apply

    world = PartialState().num_processes

    def first_of_each(x: Tensor) -> Tensor:
        by_rank = x.unflatten(0, (world // size, size, len(x) // world))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(first_of_each, original(*args, **kwargs))


def _gather_object(size: int, original: Function, mine: Any, **kwargs: Any) -> Any:
    """The same of lists of anything, which may differ in length."""
    from accelerate.state import PartialState

    return original([] if PartialState().process_index % size else mine, **kwargs)


FUNCTIONS: Mapping[str, Mapping[str, Function]] = MappingProxyType(
    {
        "prepare_data_loader": {"prepare_data_loader": _prepare_data_loader},
        "gather_for_metrics": {"gather": _gather, "gather_object": _gather_object},
    }
)
"""Methods of an Accelerator, and what runs for the functions of accelerate.accelerator there."""
