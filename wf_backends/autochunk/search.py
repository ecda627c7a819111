"""The chunk regions that could lower the memory at one step of a graph.

Regions begin and end where few bytes are live (arXiv 2401.10652, section 3.3). What a candidate
needs with any number of chunks follows from the storages of its operators: those that leave it stay
whole, the others shrink with the slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from wf_backends.autochunk.flow import Flow, Sliced, around, trace
from wf_backends.autochunk.region import slice_length
from wf_backends.graph import Step, Steps, profile, tensors

REACH = 160  # operators that a region may span on each side of the peak
ENDS = 5  # of the places where a region may begin or end, so many nearest to the peak and farthest
MOST_CHUNKS = 512


@dataclass(frozen=True)
class Candidate:
    """A flow within steps [lo, hi] of the graph, and the bytes that these steps need with it.

    `beside` is the peak of the steps around the region, `whole` what lives while the region runs
    (its inputs, its outputs and what passes by), `sliced` what its inner values would need whole.
    `region` is the region as one step, without its inner values.
    """

    lo: int
    hi: int
    flow: Flow
    beside: int
    whole: int
    sliced: int
    region: Step

    @property
    def copied(self) -> int:
        """The bytes that the slices write into the whole outputs."""
        return sum(count for _, count in self.region.allocates)

    @property
    def most(self) -> int:
        """The largest number of chunks."""
        return min(MOST_CHUNKS, self.flow.rows // self.flow.unit)

    def inner(self, chunks: int) -> int:
        """The bytes of one slice's inner values."""
        share = slice_length(self.flow, chunks) / self.flow.rows
        return math.ceil(self.sliced * min(1.0, share))

    def peak(self, chunks: int) -> int:
        """The bytes that the steps need with so many chunks."""
        return max(self.beside, self.whole + self.inner(chunks))

    def chunks_for(self, budget: int) -> int | None:
        """The fewest chunks with which the steps fit the budget; None: no number does."""
        room = budget - self.whole
        if self.beside > budget or room <= 0:
            return None
        chunks = max(2, math.ceil(self.sliced / room))
        while chunks <= self.most and self.peak(chunks) > budget:
            chunks += 1  # slices are rounded up to the flow's unit
        return chunks if chunks <= self.most else None


def candidate_in(graph: Steps, lo: int, hi: int, dim: int) -> Candidate | None:
    """The candidate of steps [lo, hi] whose end is sliced along `dim`, if there is one."""
    flow = trace([step.node for step in graph.steps[lo : hi + 1]], dim)
    return None if flow is None else next(_candidate(graph, lo, hi, flow, graph.alive(lo)), None)


def collapse(graph: Steps, lo: int, hi: int, flow: Flow, region: Step) -> list[Step]:
    """Steps [lo, hi] with those of the flow run as one."""
    window = [step.node for step in graph.steps[lo : hi + 1]]
    before, after = around(window, {op.node for op in flow.operators})
    steps = [[graph.steps[graph.position[node]] for node in nodes] for nodes in (before, after)]
    return [*steps[0], region, *steps[1]]


def candidates_at(graph: Steps, peak: int) -> Iterator[Candidate]:
    """The candidates whose regions hold step `peak`."""
    lows, highs = _ends(graph, peak)
    alive = {lo: graph.alive(lo) for lo in lows}
    for hi in highs:
        window = [step.node for step in graph.steps[min(lows) : hi + 1]]
        for dim, rows in enumerate(_shape(window[-1])):
            flow = trace(window, dim) if rows > 1 else None
            if flow is None:
                continue
            for lo in lows:
                part = flow.since(graph.steps[lo].node)
                if any(op.node is graph.steps[peak].node for op in part.operators):
                    yield from _candidate(graph, lo, hi, part, alive[lo])


def _shape(node: fx.Node) -> Sequence[int]:
    value = node.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else ()


def _ends(graph: Steps, peak: int) -> tuple[list[int], list[int]]:
    """Where regions around `peak` may begin and end: going away from the peak, the steps before
    (after) which fewer bytes live than at all between."""
    live = graph.live
    lows, highs = [], []
    for lo in range(peak, max(-1, peak - REACH), -1):
        if not lows or live[lo] < live[lows[-1]]:
            lows.append(lo)
    for hi in range(peak, min(len(graph.steps), peak + REACH)):
        if not highs or live[hi + 1] < live[highs[-1] + 1]:
            highs.append(hi)
    return _nearest_and_farthest(lows), _nearest_and_farthest(highs)


def _nearest_and_farthest(places: list[int]) -> list[int]:
    """Where live bytes fall all the way, as in a UNet, the farthest ones alone would hold other
    layers with peaks of their own."""
    return list(dict.fromkeys((*places[:ENDS], *places[-ENDS:])))


def _candidate(
    graph: Steps, lo: int, hi: int, flow: Flow, alive: dict[int, int]
) -> Iterator[Candidate]:
    """The candidate of a flow within steps [lo, hi], where it may be one."""
    members = {op.node for op in flow.operators}
    window = graph.steps[lo : hi + 1]
    if not all(_given_as_tensors(op, members) for op in flow.operators):
        return
    inner = [step for step in window if step.node in members]
    born = {storage for step in inner for storage, _ in step.allocates}
    outputs: dict[int, int] = {}
    for step in inner:
        if any(user not in members for user in step.node.users):
            (storage,) = graph.of[step.node] if len(graph.of[step.node]) == 1 else (-1,)
            if storage not in born:
                return  # a list, or a view of what lies outside
            outputs[storage] = outputs.get(storage, 0) + tensors(step.node)[0].nbytes
    if not all(_may_move(graph, step, members, born) for step in window):
        return
    reads = tuple({s: None for step in inner for s in step.reads if s not in born})
    region = Step(flow.end.node, reads, tuple(outputs.items()), 0, 0)
    kept = {s for s, last in graph.last.items() if last > hi}
    order = collapse(graph, lo, hi, flow, region)
    peaks = profile(order, kept, alive)
    whole = peaks.pop(order.index(region))
    sliced = max(profile(inner, set(outputs)))
    yield Candidate(lo, hi, flow, max(peaks, default=0), whole, sliced, region)


def _given_as_tensors(op: Sliced, members: set[fx.Node]) -> bool:
    """Whether what the operator reads from outside the region is tensors, not lists of them."""
    outside = (source.node for source in op.sources if source.node not in members)
    return all(isinstance(node.meta["val"], torch.Tensor) for node in outside)


def _may_move(graph: Steps, step: Step, members: set[fx.Node], born: set[int]) -> bool:
    """Whether a region may change the place of this step: it draws no random numbers, and what it
    writes to in place lies within the region."""
    if step.node.op != "call_function" or not isinstance(step.node.target, torch._ops.OpOverload):
        return True
    if _random(step.node):
        return False
    if not step.node.target._schema.is_mutable:
        return True
    written = graph.of[step.node.args[0]] if isinstance(step.node.args[0], fx.Node) else ()
    return step.node in members and bool(written) and all(s in born for s in written)


def _random(node: fx.Node) -> bool:
    attention = torch.ops.aten.scaled_dot_product_attention.default
    if node.target is attention:
        return bool(node.kwargs.get("dropout_p") or (len(node.args) > 4 and node.args[4]))
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
