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
from typing import Any

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
    from wf_transformers.whole_batches.by_group import FUNCTIONS  # accelerate need not be there

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


def group_size(accelerator: Any) -> int:
    """How many ranks have the same samples of the accelerator's loaders."""
    groups: GroupSizes | None = getattr(accelerator, GROUPS, None)
    return groups.sizes[0]() if groups and groups.sizes else 1


def gathering_by_group(accelerator: Any, method: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a method; what it gathers by `accelerator` has the samples of every group once."""
    from wf_transformers.whole_batches.by_group import FUNCTIONS

    functions = FUNCTIONS["gather_for_metrics"]
    return _run(functions, getattr(accelerator, GROUPS).sizes, method, *args, **kwargs)
