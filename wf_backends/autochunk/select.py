"""Selects regions, and the number of their slices, that fit a budget with the least slowdown.

The loop of arXiv 2401.10652, section 3.4: while the peak is above the budget, take the step at the
peak, choose the cheapest region around it that fits, and choose it in all identical layers, too.
Unlike in the paper, a cheaper region replaces earlier ones that it overlaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import fx

from wf_backends.autochunk.cost import OperatorCost, Rates
from wf_backends.autochunk.graph import (
    Copied,
    GraphStep,
    Steps,
    arguments,
    nbytes,
    operator_name,
    tensors,
    with_copies,
)
from wf_backends.autochunk.search import Candidate, candidate_in, candidates_at
from wf_backends.autochunk.slicing import SlicedOperator, sources

NUM_BISECTIONS = 8  # of the range of budgets, to find the least memory within a slowdown
NUM_PARTS = 5  # of the range of budgets that is tried again afterwards, from the smallest on


@dataclass(frozen=True)
class Chosen:
    """The same candidate in identical layers, with its number of slices and the seconds that each
    of the layers takes longer."""

    layers: tuple[Candidate, ...]
    num_slices: int
    added_seconds: float

    @property
    def first(self) -> Candidate:
        return self.layers[0]

    @property
    def peak(self) -> int:
        """The bytes that the first candidate's steps need."""
        return self.first.peak(self.num_slices)

    def overlaps(self, lo: int, hi: int) -> bool:
        """Whether any of steps [lo, hi] belongs to a layer."""
        return any(layer.lo <= hi and lo <= layer.hi for layer in self.layers)


@dataclass(frozen=True)
class Selection:
    """Choices whose candidates do not overlap. `peak` is predicted, in bytes; `slowdown` is the
    added time as a share of the model's time."""

    choices: tuple[Chosen, ...]
    peak: int
    slowdown: float


class Search:
    """Finds selections for one graph. The candidates of a step are kept for all budgets.

    `copied` says which values the graph recomputes for each reader. A graph with copies takes
    longer than the model, whose time is `seconds` (None: the same as the graph's).
    """

    def __init__(
        self, steps: Steps, rates: Rates, copied: Copied = "", seconds: float | None = None
    ) -> None:
        self.steps, self.copied, self._rates = steps, copied, rates
        self._signatures = [step.signature for step in steps.steps]
        self._candidates_at = cache(partial(candidates_at, steps))
        self._candidate_in = cache(partial(candidate_in, steps))
        self._costs: dict[tuple[int, int], OperatorCost] = {}
        self._graph_seconds = sum(map(self._seconds, steps.steps))
        self._model_seconds = self._graph_seconds if seconds is None else seconds

    def with_copies(self, copied: Copied) -> Search | None:
        """The search for the graph with copies; None if there is nothing to copy."""
        steps = with_copies(self.steps, copied)
        return steps and Search(steps, self._rates, copied, self._model_seconds)

    def walls(self) -> tuple[tuple[str, int], ...]:
        """The operators that no region may contain, with their number, the most frequent first."""
        nodes = (step.node for step in self.steps.steps)
        walls = Counter(operator_name(node) for node in nodes if self._is_wall(node))
        return tuple(walls.most_common())

    def _is_wall(self, node: fx.Node) -> bool:
        """Operators without inputs, and those that return scalars, are never walls."""
        dims = range(max((t.ndim for t in tensors(node)), default=0))
        if not node.all_input_nodes or all(t.numel() <= 1 for t in tensors(node)):
            return False
        return all(sources(node, dim) is None for dim in dims)

    def within_slowdown(self, max_slowdown: float) -> Selection:
        """The selection of least memory whose slowdown is at most `max_slowdown`, by bisection.

        A larger budget may be slower, and bisection then leaves out smaller ones that would do.
        Some of these are tried afterwards.
        """
        best = self.within_memory(max(self.steps.peaks))
        low, high, least_peak = 0, best.peak, best.peak
        for _ in range(NUM_BISECTIONS):
            budget = (low + high) // 2
            selection = self.within_memory(budget)
            least_peak = min(least_peak, selection.peak)
            if selection.slowdown <= max_slowdown and selection.peak < best.peak:
                best, high = selection, selection.peak
            else:
                low = budget
            if high - low <= high // 100:
                break
        for part in range(1, NUM_PARTS) if least_peak < best.peak else ():
            budget = least_peak + (best.peak - least_peak) * part // NUM_PARTS
            selection = self.within_memory(budget)
            if selection.slowdown <= max_slowdown and selection.peak < best.peak:
                return selection
        return best

    def within_memory(self, budget: int) -> Selection:
        """The cheapest selection that fits `budget` bytes, or else the one of least memory."""
        choices: list[Chosen] = []
        replaced: set[int] = set()  # steps for which overlapping choices were dropped
        while True:
            peaks = self._peaks(choices)
            peak = max(peaks)
            if peak <= budget:
                break
            step = peaks.index(peak)
            choice = self._choose(step, budget, choices)
            cheaper = None if step in replaced else self._cheaper(choice, step, budget)
            if cheaper is not None:
                replaced.add(step)
                lo, hi = cheaper.first.lo, cheaper.first.hi
                choices = [other for other in choices if not other.overlaps(lo, hi)]
                choice = cheaper
            if choice is None or choice.peak >= peak:
                break
            budget = max(budget, choice.peak)
            choices.append(self._in_all_layers(choice, budget, choices))
        choices = [self._with_fewest_slices(choice, peak) for choice in choices]
        added = sum(choice.added_seconds * len(choice.layers) for choice in choices)
        slowdown = (self._graph_seconds + added) / self._model_seconds - 1
        return Selection(tuple(choices), peak, max(0.0, slowdown))

    def _peaks(self, choices: Sequence[Chosen]) -> list[int]:
        """The live bytes at each step; of a candidate's steps only one counts, with their peak."""
        peaks = list(self.steps.peaks)
        for choice in choices:
            for candidate in choice.layers:
                peaks[candidate.lo : candidate.hi + 1] = [0] * len(candidate.window)
                peak, step = candidate.peak(choice.num_slices), candidate.hi
                if peak == candidate.outside_peak:
                    step = candidate.outside_peak_step
                peaks[step] = peak
        return peaks

    def _with_fewest_slices(self, choice: Chosen, peak: int) -> Chosen:
        """The choice with no more slices than `peak` needs, which another region may cause."""
        num_slices = max(c.slices_within(peak) or choice.num_slices for c in choice.layers)
        return Chosen(choice.layers, num_slices, self._added_seconds(choice.first, num_slices))

    def _choose(self, step: int, budget: int, chosen: Sequence[Chosen]) -> Chosen | None:
        """The cheapest candidate around a step that fits, or else the one of least memory."""
        candidates = self._candidates_at(step)
        free = [c for c in candidates if not any(other.overlaps(c.lo, c.hi) for other in chosen)]
        with_slices = [(candidate, candidate.slices_within(budget)) for candidate in free]
        fitting = [(candidate, count) for candidate, count in with_slices if count is not None]
        if not fitting and free:
            smallest = min(free, key=lambda candidate: candidate.peak(candidate.max_slices))
            fitting = [(smallest, smallest.max_slices)]
        choices = (Chosen((c,), n, self._added_seconds(c, n)) for c, n in fitting)
        return min(choices, key=lambda choice: choice.added_seconds, default=None)

    def _cheaper(self, choice: Chosen | None, step: int, budget: int) -> Chosen | None:
        """The cheapest choice around a step that fits, also if it overlaps those made before; None
        if `choice` fits and takes no longer."""
        cheapest = self._choose(step, budget, ())
        if cheapest is None or cheapest.peak > budget:
            return None
        if choice is None or choice.peak > budget:
            return cheapest
        return cheapest if cheapest.added_seconds < choice.added_seconds else None

    def _added_seconds(self, candidate: Candidate, num_slices: int) -> float:
        """The seconds that slices add: in the operators, for writing outputs, and in the loop."""
        costs = map(self._cost, candidate.flow.operators)
        added = sum(cost.seconds(num_slices) - cost.seconds(1) for cost in costs)
        loop = num_slices * self._rates.slice_seconds
        return added + candidate.output_bytes / self._rates.bytes_per_s + loop

    def _cost(self, op: SlicedOperator) -> OperatorCost:
        step = self.steps.steps[self.steps.position[op.node]]
        key = step.signature, op.dim
        if key not in self._costs:
            self._costs[key] = OperatorCost.estimate(op, step.flops, self._rates)
        return self._costs[key]

    def _in_all_layers(self, choice: Chosen, budget: int, chosen: Sequence[Chosen]) -> Chosen:
        """The choice, with its candidate also in all other steps with the same operators that do
        not fit the budget."""
        first = choice.first
        signatures = self._signatures[first.lo : first.hi + 1]
        for lo in range(len(self._signatures) - len(signatures) + 1):
            hi = lo + len(signatures) - 1
            if self._signatures[lo] != signatures[0] or self._signatures[lo : hi + 1] != signatures:
                continue
            if any(other.overlaps(lo, hi) for other in (choice, *chosen)):
                continue
            if max(self.steps.peaks[lo : hi + 1]) <= budget:
                continue
            candidate = self._candidate_in(lo, hi, first.flow.end.dim)
            if candidate is not None and candidate.peak(choice.num_slices) <= budget:
                choice = replace(choice, layers=(*choice.layers, candidate))
        return choice

    def _seconds(self, step: GraphStep) -> float:
        """The predicted time of an operator that is not sliced."""
        rates = self._rates
        traffic = sum(map(nbytes, (step.node, *arguments(step.node)))) / rates.bytes_per_s
        return rates.launch_seconds + max(step.flops / rates.flops_per_s, traffic)
