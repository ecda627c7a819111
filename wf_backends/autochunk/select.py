"""Selects regions, and the number of their slices, that fit a budget with the least slowdown.

The loop of arXiv 2401.10652, section 3.4: while the peak is above the budget, take the step at the
peak, choose the cheapest region around it that fits, and choose it in all identical layers, too.
Unlike in the paper, a cheaper region replaces earlier ones that it overlaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
class Choice:
    """A candidate, the number of its slices, and the seconds that they add."""

    candidate: Candidate
    num_slices: int
    added_seconds: float

    @property
    def peak(self) -> int:
        """The bytes that the candidate's steps need."""
        return self.candidate.peak(self.num_slices)


@dataclass(frozen=True)
class Selection:
    """Choices whose candidates do not overlap. `peak` is predicted, in bytes; `slowdown` is the
    added time as a share of the model's time."""

    choices: tuple[Choice, ...]
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
        choices: list[Choice] = []
        replaced: set[int] = set()  # steps whose choice took the place of others: once each
        while (peak := max(peaks := self._peaks(choices))) > budget:
            step = peaks.index(peak)
            kept = choices if step in replaced else []
            choice = self._cheapest(step, budget, kept) or self._smallest(step, choices)
            if choice is None or choice.peak >= peak:
                break
            budget = max(budget, choice.peak)
            if _is_free(choice.candidate.lo, choice.candidate.hi, choices):
                choices += self._in_equal_layers(choice, budget, choices)
            else:
                replaced.add(step)
                layers = self._in_equal_layers(choice, budget, [])
                choices = [c for c in choices if _is_free(c.candidate.lo, c.candidate.hi, layers)]
                choices += layers
        choices = [self._with_fewest_slices(choice, peak) for choice in choices]
        added = sum(choice.added_seconds for choice in choices)
        slowdown = (self._graph_seconds + added) / self._model_seconds - 1
        return Selection(tuple(choices), peak, max(0.0, slowdown))

    def _peaks(self, choices: Sequence[Choice]) -> list[int]:
        """The live bytes at each step; of a candidate's steps only one counts, with their peak."""
        peaks = list(self.steps.peaks)
        for choice in choices:
            candidate, peak = choice.candidate, choice.peak
            peaks[candidate.lo : candidate.hi + 1] = [0] * len(candidate.window)
            at_outside = peak == candidate.outside_peak
            peaks[candidate.outside_peak_step if at_outside else candidate.hi] = peak
        return peaks

    def _cheapest(self, step: int, budget: int, kept: Sequence[Choice]) -> Choice | None:
        """The cheapest candidate around a step that fits, in its fewest slices, and overlaps none
        of `kept`; None if there is none."""
        free = (c for c in self._candidates_at(step) if _is_free(c.lo, c.hi, kept))
        counts = ((candidate, candidate.slices_within(budget)) for candidate in free)
        fitting = (self._choice(candidate, count) for candidate, count in counts if count)
        return min(fitting, key=lambda choice: choice.added_seconds, default=None)

    def _smallest(self, step: int, kept: Sequence[Choice]) -> Choice | None:
        """The candidate around a step that needs the least memory, and overlaps none of `kept`."""
        free = (c for c in self._candidates_at(step) if _is_free(c.lo, c.hi, kept))
        smallest = min(free, key=lambda c: c.peak(c.max_slices), default=None)
        return smallest and self._choice(smallest, smallest.max_slices)

    def _with_fewest_slices(self, choice: Choice, peak: int) -> Choice:
        """The choice with no more slices than `peak` needs, which another region may cause."""
        num_slices = choice.candidate.slices_within(peak) or choice.num_slices
        return self._choice(choice.candidate, num_slices)

    def _choice(self, candidate: Candidate, num_slices: int) -> Choice:
        return Choice(candidate, num_slices, self._added_seconds(candidate, num_slices))

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

    def _in_equal_layers(self, choice: Choice, budget: int, kept: list[Choice]) -> list[Choice]:
        """The choice, and the same one at all other steps with the same operators that do not fit
        the budget and do not belong to a choice that is kept."""
        first, layers = choice.candidate, [choice]
        signatures = self._signatures[first.lo : first.hi + 1]
        for lo in range(len(self._signatures) - len(signatures) + 1):
            hi = lo + len(signatures) - 1
            if self._signatures[lo] != signatures[0] or self._signatures[lo : hi + 1] != signatures:
                continue
            if max(self.steps.peaks[lo : hi + 1]) <= budget or not _is_free(lo, hi, layers + kept):
                continue
            candidate = self._candidate_in(lo, hi, first.flow.end.dim)
            if candidate is not None and candidate.peak(choice.num_slices) <= budget:
                layers.append(replace(choice, candidate=candidate))
        return layers

    def _seconds(self, step: GraphStep) -> float:
        """The predicted time of an operator that is not sliced."""
        rates = self._rates
        traffic = sum(map(nbytes, (step.node, *arguments(step.node)))) / rates.bytes_per_s
        return rates.launch_seconds + max(step.flops / rates.flops_per_s, traffic)


def _is_free(lo: int, hi: int, choices: Iterable[Choice]) -> bool:
    """Whether none of steps [lo, hi] belongs to a choice."""
    taken = (choice.candidate for choice in choices)
    return all(candidate.hi < lo or hi < candidate.lo for candidate in taken)
