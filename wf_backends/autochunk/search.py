"""Candidates for chunk regions that lower the memory at one step of a graph.

Regions begin and end where few bytes are live (arXiv 2401.10652, section 3.3). The memory of a
candidate with any number of slices follows from the storages of its operators: storages that are
read outside the region are allocated whole, the others for one slice at a time.

A region may write its last output to the memory of an input, such as a residual stream `x` in
`x + f(x)`. It may do so if each slice reads only those rows of the input that it overwrites, and
rows next to them (a convolution's halo), and no operator reads the input later. The model's own
inputs are never overwritten.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from wf_backends.autochunk.graph import GraphStep, Steps, layout, nbytes, profile
from wf_backends.autochunk.region import Region, covered_rows, rows_before, slice_length
from wf_backends.autochunk.slicing import Call, Flow, trace, view_base

MAX_REACH = 160  # operators of a region on each side of the peak
NUM_ENDS = 8  # steps on each side of the peak where regions may begin or end: see `_ends`
MAX_SLICES = 512


@dataclass(frozen=True, eq=False)
class Candidate:
    """A flow within steps [lo, hi] of the graph, and the bytes that these steps need with it."""

    lo: int
    hi: int
    window: Sequence[fx.Node]  # the nodes of these steps
    flow: Flow
    fixed_bytes: int  # live while the region runs: inputs, outputs, and values of other steps
    sliced_bytes: int  # of the flow's inner values, if it is not sliced
    output_bytes: int
    outside_peak: int  # of the steps outside the flow, which run before or after it
    outside_peak_step: int
    overwritten: fx.Node | None  # the input that the flow's end overwrites

    @cached_property
    def max_slices(self) -> int:
        halo = rows_before(self.flow, self.overwritten)
        return min(MAX_SLICES, self.flow.rows // max(self.flow.alignment, halo))

    def region(self, length: int) -> Region:
        """The region in slices of `length` rows."""
        return Region(self.window, self.flow, length, self.overwritten)

    def peak(self, num_slices: int) -> int:
        """The bytes that the steps need with so many slices."""
        share = min(1.0, slice_length(self.flow, num_slices) / self.flow.rows)
        return max(self.outside_peak, self.fixed_bytes + math.ceil(self.sliced_bytes * share))

    def slices_within(self, budget: int) -> int | None:
        """The fewest slices with which the steps fit `budget` bytes; None if no number does."""
        left = budget - self.fixed_bytes
        if self.outside_peak > budget or left <= 0:
            return None
        counts = range(max(2, math.ceil(self.sliced_bytes / left)), self.max_slices + 1)
        # not always the first: a slice's rows are rounded up to the flow's alignment
        return next((count for count in counts if self.peak(count) <= budget), None)


def candidates_at(graph: Steps, peak: int) -> list[Candidate]:
    """The candidates whose regions contain step `peak`."""
    first, last = max(-1, peak - MAX_REACH), min(len(graph.steps), peak + MAX_REACH)
    starts = _ends({lo: graph.live[lo] for lo in range(peak, first, -1)})
    ends = _ends({hi: graph.live[hi + 1] for hi in range(peak, last)})
    candidates: list[Candidate | None] = []
    for hi in ends:
        window = [step.node for step in graph.steps[min(starts) : hi + 1]]
        value = window[-1].meta["val"]
        for dim in range(value.ndim if isinstance(value, torch.Tensor) else 0):
            flow = trace(window, dim)
            positions = [graph.position[op.node] for op in flow.operators] if flow else []
            if flow is None or peak not in positions:
                continue
            for index in dict.fromkeys(bisect_left(positions, start) for start in starts):
                tail = Flow(flow.operators[index:])
                candidates.append(_candidate(graph, positions[index], hi, tail))
    return [candidate for candidate in candidates if candidate is not None]


def candidate_in(graph: Steps, lo: int, hi: int, dim: int) -> Candidate | None:
    """The candidate of steps [lo, hi] whose end is sliced along `dim`, or None."""
    flow = trace([step.node for step in graph.steps[lo : hi + 1]], dim)
    return None if flow is None else _candidate(graph, lo, hi, flow)


def _ends(live: dict[int, int]) -> list[int]:
    """The steps where regions may begin or end: those with fewer live bytes than all steps nearer
    to the peak. `live` has the live bytes beyond each step, going away from the peak.

    Returns at most the NUM_ENDS nearest ones. In a UNet, where live bytes fall from layer to layer,
    regions up to far ones would contain the peaks of other layers.
    """
    minima: list[int] = []
    for step, live_bytes in live.items():
        if not minima or live_bytes < live[minima[-1]]:
            minima.append(step)
    return minima[:NUM_ENDS]


def _candidate(graph: Steps, lo: int, hi: int, flow: Flow) -> Candidate | None:
    """The candidate of a flow within steps [lo, hi]; None if it cannot be a region."""
    steps = graph.steps[lo : hi + 1]
    window = [step.node for step in steps]
    inner = [step for step in steps if step.node in flow.members]
    allocated = {storage for step in inner for storage in step.allocates}
    outputs = Counter[int]()  # bytes that are read outside the flow, by storage
    for op in flow.outputs:
        outputs[graph.storages[op.node][0]] += nbytes(op.node)
    if not (
        flow.rows >= 2 * flow.alignment
        and flow.end.node.users
        and allocated.issuperset(outputs)
        and _computes_all_rows(flow)
        and not any(map(_is_random, window))
        and _preserves_writes(graph, lo, hi, flow, allocated)
        and _preserves_strides(graph, flow)
    ):
        return None
    before, after = flow.others(window)
    overwritten = _input_to_overwrite(graph, flow, hi, after)
    allocates = dict(outputs)
    if overwritten is not None:
        allocates[graph.storages[flow.end.node][0]] -= nbytes(overwritten)
    reads = tuple({s for step in inner for s in step.reads} - allocated)
    order = [graph.steps[graph.position[node]] for node in (*before, *after)]
    order.insert(len(before), GraphStep(flow.end.node, reads, allocates))
    reused = graph.storages[overwritten] if overwritten else ()
    touched = {s for step in steps for s in (*step.reads, *step.allocates)}
    kept = {s for s in touched if s in reused or graph.last_use[s] > hi}
    _, peaks = profile(order, kept, graph.storage_bytes, graph.live[lo])
    fixed_bytes = peaks[len(before)]
    peaks[len(before)] = 0
    outside_peak = max(peaks)
    outside_peak_step = graph.position[order[peaks.index(outside_peak)].node]
    sliced_bytes = _sliced_bytes(flow, inner, outputs)
    if rows_before(flow, overwritten):  # one more slice of the end is live
        sliced_bytes += graph.storage_bytes[graph.storages[flow.end.node][0]]
    sizes = fixed_bytes, sliced_bytes, outputs.total(), outside_peak
    return Candidate(lo, hi, window, flow, *sizes, outside_peak_step, overwritten)


def _sliced_bytes(flow: Flow, inner: Sequence[GraphStep], outputs: Container[int]) -> int:
    """The bytes that a flow's steps need, if it is not sliced; `outputs` are live to its end.
    Inputs with a halo count, too: slices at the border get copies of them."""
    padded = {
        op.node: sum(nbytes(source.node) for source in op.sources if source.before or source.after)
        for op in flow.operators
    }
    with_pads = [replace(s, temporary=s.temporary + padded[s.node]) for s in inner]
    return max(profile(with_pads, outputs)[1])


def _computes_all_rows(flow: Flow) -> bool:
    """Whether inputs and outputs are tensors (not lists), and slices compute all rows of outputs:
    readers with a stride may skip rows, and a reader of a part of a tensor leaves out its ends."""
    border = [node for node, _ in flow.inputs] + [op.node for op in flow.outputs]
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in border):
        return False
    return all(
        covered_rows(rows[op.value] for rows in flow.halves) == op.rows for op in flow.outputs[:-1]
    )


def _preserves_writes(graph: Steps, lo: int, hi: int, flow: Flow, allocated: set[int]) -> bool:
    """Whether all readers see in-place writes as in the graph.

    A write within steps [lo, hi] must be the flow's, to a storage that the flow allocates and that
    no other step reads before it: that step might run after the region. A storage that is written
    later must be in one output alone: two outputs would be two copies.
    """
    num_outputs = Counter(s for op in flow.outputs for s in graph.storages[op.node])
    for position, written in graph.written_storages.items():
        if position > hi and any(num_outputs[s] > 1 for s in written):
            return False
        if lo <= position <= hi:
            if graph.steps[position].node not in flow.members or not written <= allocated:
                return False
            for step in graph.steps[lo:position]:
                if step.node not in flow.members and written.intersection(step.reads):
                    return False
    return True


def _preserves_strides(graph: Steps, flow: Flow) -> bool:
    """Whether `as_strided`, which reads memory by position, finds the outputs where it expects
    them: they are allocated dense, also where the graph has a view of a part of a tensor."""
    for op in flow.outputs:
        (storage,), value = graph.storages[op.node], op.node.meta["val"]
        views = graph.nodes_by_storage[storage]
        if any(view.target is torch.ops.aten.as_strided.default for view in views):
            dense = layout(torch.empty_like(value)) == layout(value)
            if not dense or graph.storage_bytes[storage] != nbytes(op.node):
                return False
    return True


def _is_random(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return Call.from_node(node)["dropout_p"] > 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _input_to_overwrite(
    graph: Steps, flow: Flow, hi: int, after: Iterable[fx.Node]
) -> fx.Node | None:
    """The input that the end of a flow may overwrite, or None.

    `hi` is the last step of the flow's window, `after` the nodes of the window that run after the
    region.
    """
    end = flow.end.node
    read_after = {s for node in after for arg in node.all_input_nodes for s in graph.storages[arg]}
    for node, _ in flow.inputs:
        if layout(node.meta["val"]) != layout(end.meta["val"]) or node not in graph.position:
            continue
        (storage,) = graph.storages[node]
        if (
            graph.storage_bytes.get(storage) == nbytes(end)
            and graph.last_use[storage] <= hi
            and storage not in read_after
            and _has_known_views(graph, storage, flow)
            and _reads_rows_around(graph, storage, flow, node)
            and rows_before(flow, node) < flow.halves[1][flow.end.value][0]  # not cut at row 0
        ):
            return node
    return None


def _has_known_views(graph: Steps, storage: int, flow: Flow) -> bool:
    """Whether no other storage of the graph can be this one in a run. A reshape that copies in the
    graph may return a view then: outputs of regions may have other strides than their nodes."""
    nodes = graph.nodes_by_storage[storage]
    users = {user for node in nodes for user in node.users} - flow.members
    return view_base(nodes[0]) is None and all(
        view_base(user) is None or storage in graph.storages[user] for user in users
    )


def _reads_rows_around(graph: Steps, storage: int, flow: Flow, node: fx.Node) -> bool:
    """Whether a slice reads only rows of the storage around those that it computes of the end: for
    one row of the end one row, and a halo."""
    return all(
        source.node is node and source.dim == flow.end.dim and op.scale * source.scale == 1
        for op in flow.operators
        for source in op.sources
        if source.node not in flow.members and storage in graph.storages[source.node]
    )
