"""The chunk regions that could lower the memory at one step of a graph.

Regions begin and end where few bytes are live (arXiv 2401.10652, section 3.3). What a candidate
needs with any number of chunks follows from the storages of its operators: those that leave it stay
whole, the others shrink with the slices.

A region's end may take the memory of an input, such as a residual stream, which then does not live
twice: every slice reads the input's rows that it overwrites afterwards, and no others, and nobody
reads them later. An input of the model is its caller's, and is never taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from wf_backends.autochunk.region import covered, slice_length
from wf_backends.graph import Step, Steps, layout, nbytes, profile
from wf_backends.slicing import Flow, trace, view_base

REACH = 160  # operators that a region may span on each side of the peak
ENDS = 5  # of the places where a region may begin or end, so many nearest to the peak and farthest
MOST_CHUNKS = 512


@dataclass(frozen=True, eq=False)
class Candidate:
    """A flow within steps [lo, hi] of the graph, and the bytes that these steps need with it."""

    lo: int
    hi: int
    flow: Flow
    whole: int  # live while the region runs: its inputs, its outputs and what passes by
    sliced: int  # that its inner values would need whole
    copied: int  # of its outputs
    beside: int  # the peak of the steps around the region, at step `place`
    place: int
    overwritten: fx.Node | None  # the input whose memory the flow's end takes

    @property
    def most(self) -> int:
        """The largest number of chunks."""
        return min(MOST_CHUNKS, self.flow.rows // self.flow.alignment)

    def peak(self, chunks: int) -> int:
        """The bytes that the steps need with so many chunks."""
        share = slice_length(self.flow, chunks) / self.flow.rows
        return max(self.beside, self.whole + math.ceil(self.sliced * min(1.0, share)))

    def chunks_for(self, budget: int) -> int | None:
        """The fewest chunks with which the steps fit the budget; None: no number does."""
        room = budget - self.whole
        if self.beside > budget or room <= 0:
            return None
        chunks = max(2, math.ceil(self.sliced / room))
        while chunks <= self.most and self.peak(chunks) > budget:
            chunks += 1  # slices are rounded up to the flow's unit
        return chunks if chunks <= self.most else None


def candidates_at(graph: Steps, peak: int) -> list[Candidate]:
    """The candidates whose regions hold step `peak`."""
    live, first, last = graph.live, max(-1, peak - REACH), min(len(graph.steps), peak + REACH)
    lows = _ends({lo: live[lo] for lo in range(peak, first, -1)})
    highs = _ends({hi: live[hi + 1] for hi in range(peak, last)})
    candidates: list[Candidate | None] = []
    for hi in highs:
        window = [step.node for step in graph.steps[min(lows) : hi + 1]]
        value = window[-1].meta["val"]
        for dim in range(value.ndim if isinstance(value, torch.Tensor) else 0):
            flow = trace(window, dim, graph.sources)
            places = [graph.position[op.node] for op in flow.operators] if flow else []
            if flow is None or peak not in places:
                continue
            begins = (next(place for place in places if place >= lo) for lo in lows)
            for lo in dict.fromkeys(begins):
                part = Flow(flow.operators[places.index(lo) :])
                candidates.append(_candidate(graph, lo, hi, part))
    return [found for found in candidates if found is not None]


def candidate_in(graph: Steps, lo: int, hi: int, dim: int) -> Candidate | None:
    """The candidate of steps [lo, hi] whose end is sliced along `dim`, if there is one."""
    flow = trace([step.node for step in graph.steps[lo : hi + 1]], dim, graph.sources)
    return None if flow is None else _candidate(graph, lo, hi, flow)


def _ends(live: dict[int, int]) -> list[int]:
    """Where regions may begin or end: going away from the peak, the steps beyond which fewer bytes
    live than at all between.

    Where live bytes fall all the way, as in a UNet, the farthest ones alone would hold other layers
    with peaks of their own.
    """
    found: list[int] = []
    for step, count in live.items():
        if not found or count < live[found[-1]]:
            found.append(step)
    return list(dict.fromkeys((*found[:ENDS], *found[-ENDS:])))


def _candidate(graph: Steps, lo: int, hi: int, flow: Flow) -> Candidate | None:
    """The candidate of a flow within steps [lo, hi], where it may be one."""
    window = graph.steps[lo : hi + 1]
    inner = [step for step in window if step.node in flow.members]
    born = {storage for step in inner for storage in step.allocates}
    outputs = Counter[int]()  # bytes that others read, by storage
    for op in flow.outputs:
        outputs[graph.storages[op.node][0]] += nbytes(op.node)
    if not (
        flow.rows >= 2 * flow.alignment
        and born.issuperset(outputs)
        and _passes_on_all(flow)
        and not any(_random(step.node) for step in window)
        and _keeps_writes(graph, lo, hi, flow, born)
    ):
        return None
    before, after = flow.others([step.node for step in window])
    over = _input_to_overwrite(graph, flow, hi, after)
    allocates = dict(outputs)
    if over is not None:
        allocates[graph.storages[flow.end.node][0]] -= nbytes(over)
    reads = tuple({s: None for step in inner for s in step.reads if s not in born})
    order = [graph.steps[graph.position[node]] for node in (*before, *after)]
    order.insert(len(before), Step(flow.end.node, reads, allocates))
    taken = graph.storages[over] if over else ()
    touched = {s for step in window for s in (*step.reads, *step.allocates)}
    kept = {s for s in touched if s in taken or graph.last_use.get(s, 0) > hi}
    peaks = profile(order, kept, graph.storage_bytes, graph.live[lo])
    whole, peaks[len(before)] = peaks[len(before)], 0
    beside = max(peaks)
    place = graph.position[order[peaks.index(beside)].node]
    sliced = max(profile(inner, outputs))
    return Candidate(lo, hi, flow, whole, sliced, outputs.total(), beside, place, over)


def _passes_on_all(flow: Flow) -> bool:
    """Whether what slices read of others, and others of slices, is tensors, not lists of them, and
    slices compute all of their rows: a stride may skip some, and a part of a tensor lacks its
    ends."""
    read = [node for node, _ in flow.inputs] + [op.node for op in flow.outputs]
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in read):
        return False
    reach = any(source.before or source.after for op in flow.operators for source in op.sources)
    return not reach or all(
        covered(rows[op.value] for rows in flow.halves) == op.rows for op in flow.outputs
    )


def _keeps_writes(graph: Steps, lo: int, hi: int, flow: Flow, born: set[int]) -> bool:
    """Whether what is written in place is seen as the graph has it. A write within the window is
    the region's own, and nobody reads before it, but runs after the region; one behind it is seen
    by all views (two outputs would be two copies)."""
    leaving = Counter(s for op in flow.outputs for s in graph.storages[op.node])
    for place, written in graph.written_storages.items():
        if place > hi and any(leaving[s] > 1 for s in written):
            return False
        if lo <= place <= hi:
            others = (s for s in graph.steps[lo:place] if s.node not in flow.members)
            own = graph.steps[place].node in flow.members and written <= born
            if not own or any(written.intersection(step.reads) for step in others):
                return False
    return True


def _random(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(node.kwargs.get("dropout_p") or (len(node.args) > 4 and node.args[4]))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _input_to_overwrite(
    graph: Steps, flow: Flow, hi: int, after: Iterable[fx.Node]
) -> fx.Node | None:
    """The input whose memory the end of a flow may take, if there is one.

    `hi` is the last step of the flow's window, `after` the nodes of the window that run behind the
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
            and _has_no_copies(graph, storage, flow)
            and _reads_own_rows(graph, storage, flow, node)
        ):
            return node
    return None


def _has_no_copies(graph: Steps, storage: int, flow: Flow) -> bool:
    """Whether no other storage may turn out to be this one: a reshape may copy, or give a view,
    and the outputs of regions lie otherwise in memory than their nodes say."""
    nodes = graph.nodes_by_storage[storage]
    users = {user for node in nodes for user in node.users} - flow.members
    return view_base(nodes[0]) is None and all(
        view_base(user) is None or storage in graph.storages[user] for user in users
    )


def _reads_own_rows(graph: Steps, storage: int, flow: Flow, node: fx.Node) -> bool:
    """Whether a slice reads of the node's memory just the rows that it computes of the end."""
    end = flow.end
    return all(
        source.node is node
        and source.dim == end.dim
        and all(source.rows(*rows[op.value]) == rows[end.value] for rows in flow.halves)
        for op in flow.operators
        for source in op.sources
        if source.node not in flow.members and storage in graph.storages[source.node]
    )
