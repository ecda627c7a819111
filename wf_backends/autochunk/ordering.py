"""Has torch's compiler, inductor, keep the order and the values that a plan counts.

In its graph a region is unrolled. Inductor would run slices side by side, all of them alive: copies
that it can see it moves behind the last slice. So slices are written by an operator of ours, which
it does not see into, and whose declared writes and reads give the order.

Outside of regions, inductor computes a pointwise operator where its output is read, and keeps its
inputs instead: of a sum of residuals, all of them. It computes several such outputs in one loop,
whose inputs all live to its end. So an operator of ours seems to write to these outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from wf_backends.autochunk.graph import GraphStep, Steps
from wf_backends.autochunk.slicing import Flow, Value

Cut = tuple[int, int, int]  # (dim, lo, hi): rows [lo, hi) of a dimension
Write = tuple[torch.Tensor, Cut, torch.Tensor]  # of a slice to rows of an output


def write(writes: Iterable[Write], computed: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    """Write slices, after `computed` is there and before the next slice reads its rows of `read`.

    Args:
        computed: what reads rows that are overwritten.
        read: inputs of the region, see `seem_written`.
    """
    for output, (dim, lo, hi), rows in writes:
        if torch.compiler.is_compiling():
            torch.ops.wallfacer.write_slice(output, dim, lo, rows, computed, read)
        else:
            output.narrow(dim, lo, hi - lo).copy_(rows)


torch.library.define(
    "wallfacer::write_slice",
    "(Tensor(a!) output, int dim, int lo, Tensor rows, Tensor[] computed, Tensor(b!)[] read) -> ()",
    tags=torch.Tag.flexible_layout,  # else inductor copies `output`, and results were wrong
)


@torch.library.impl("wallfacer::write_slice", "CompositeExplicitAutograd")
def _write_slice(
    output: torch.Tensor,
    dim: int,
    lo: int,
    rows: torch.Tensor,
    computed: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
) -> None:
    """`read` is said to be written to, for the order; it is not."""
    output.narrow(dim, lo, rows.shape[dim]).copy_(rows)


torch.library.register_fake("wallfacer::write_slice", lambda *_: None)


def store_values(graph: Steps) -> None:
    """Have the compiler store what the plan counts, unless it keeps less in its place.

    Stored is what a library's operator reads (a matrix product, attention, a convolution), and what
    regions or several operators read, if it is computed from as many bytes or more. A mask that is
    computed from positions is not.
    """
    readers: dict[int, list[GraphStep]] = {}
    for step in graph.steps:
        if step.allocates or step.node.op == "call_module":  # else it returns a view
            for storage in set(step.reads):
                readers.setdefault(storage, []).append(step)
    kept: dict[int, set[int]] = {}  # in place of a storage: those from which it is computed
    for step in graph.steps:
        is_fused = step.node.op == "call_function" and not step.flops
        if not (is_fused and step.allocates and isinstance(step.node.meta["val"], torch.Tensor)):
            continue
        ((storage, size),) = step.allocates.items()
        sources = {source for read in step.reads for source in kept.get(read, {read})}
        read_by = readers.get(storage, [])
        shared = len(read_by) > 1 or any(reader.node.op == "call_module" for reader in read_by)
        larger = sum(graph.storage_bytes.get(source, 0) for source in sources) >= size
        if any(reader.flops for reader in read_by) or (shared and larger):
            _store_output(step.node)
        else:
            kept[storage] = sources


def _store_output(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        value = node.graph.call_function(stored, (node,))
    value.meta = dict(node.meta)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)


def stored(value: torch.Tensor) -> torch.Tensor:
    """The value itself, which the compiler stores."""
    if torch.compiler.is_compiling():
        torch.ops.wallfacer.store(value)
    return value


torch.library.define(
    "wallfacer::store", "(Tensor(a!) value) -> ()", tags=torch.Tag.needs_fixed_stride_order
)


@torch.library.impl("wallfacer::store", "CompositeExplicitAutograd")
def _store(value: torch.Tensor) -> None:
    """`value` is said to be written to; it is not."""


torch.library.register_fake("wallfacer::store", lambda _: None)


def seem_written(flow: Flow, overwritten: fx.Node | None) -> list[int]:
    """The inputs of a region, by index, that have to seem written after each slice, for the next
    one to wait.

    Each operator depends on one of them, and those that are not pointwise read none of the others
    that are sliced or computed: a matmul may copy an input first. They are few, because inductor
    computes nothing in place that reads one of them, such as a softmax of scores with a mask. torch
    refuses operators that write to expanded inputs.
    """
    through_views: dict[Value, set[int]] = {
        (node, dim): {index}
        for index, (node, dim) in enumerate(flow.inputs)
        if (dim is not None or node.op == "call_function")
        and node is not overwritten
        and not _is_expanded(node.meta["val"])
    }
    depends = dict(through_views)
    chosen: set[int] = set()
    pointwise: list[set[int]] = []
    for op in flow.operators:
        read = {i for source in op.sources for i in through_views.get(source.value, ())}
        depends[op.value] = {i for source in op.sources for i in depends.get(source.value, ())}
        if getattr(op.node.target, "is_view", False):
            through_views[op.value] = read
        elif torch.Tag.pointwise in getattr(op.node.target, "tags", ()):
            pointwise.append(depends[op.value])
        else:
            chosen |= read
    for inputs in pointwise:
        if inputs and not inputs & chosen:
            chosen.add(min(inputs))
    return sorted(chosen)


def _is_expanded(value: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in zip(value.shape, value.stride(), strict=True))
