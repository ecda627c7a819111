"""Which regions to chunk, and into how many slices, to fit a budget at the least slowdown.

The loop of arXiv 2401.10652, section 3.4: while the peak is above the budget, take the step at the
peak, choose the cheapest of the regions around it with which these steps fit, and choose it again
in every layer that is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import fx

from wf_backends.autochunk.cost import Cost, Rates
from wf_backends.autochunk.search import Candidate, candidate_in, candidates_at
from wf_backends.graph import (
    Copied,
    Step,
    Steps,
    arguments,
    nbytes,
    operator_name,
    tensors,
    with_copies,
)
from wf_backends.slicing import SlicedOperator

HALVINGS = 8  # of the range of budgets, to find the least memory within a slowdown
BETWEEN = 5  # parts of what is left between the least memory that was found and that selection


@dataclass(frozen=True)
class Choice:
    """Candidates of layers that are alike, in so many chunks, and the seconds that each adds."""

    candidates: tuple[Candidate, ...]
    chunks: int
    added_seconds: float

    @property
    def peak(self) -> int:
        """The bytes that the first candidate's steps need."""
        return self.candidates[0].peak(self.chunks)

    def holds(self, lo: int, hi: int) -> bool:
        """Whether it needs any of steps [lo, hi]."""
        return any(lo <= found.hi and found.lo <= hi for found in self.candidates)


@dataclass(frozen=True)
class Selection:
    """What the search found: no two candidates overlap. `peak` is the predicted one in bytes,
    before regions are built; `slowdown` the share of the model's time that is added."""

    choices: tuple[Choice, ...]
    peak: int
    slowdown: float


class Search:
    """Finds selections for one graph; what it knows of a step's candidates serves every budget.

    `copied` is what the graph has anew for each reader, so that it takes longer than the model,
    whose time is `seconds` (None: that of the graph).
    """

    def __init__(
        self, steps: Steps, rates: Rates, copied: Copied = "", seconds: float | None = None
    ) -> None:
        self.steps, self._rates, self.copied = steps, rates, copied
        self._kinds = [step.signature for step in steps.steps]
        self._candidates_at = cache(partial(candidates_at, steps))
        self._candidate_in = cache(partial(candidate_in, steps))
        self._costs: dict[tuple[int, int], Cost] = {}
        of_kind = {step.signature: step for step in steps.steps}
        seconds_of = {kind: self._seconds(step) for kind, step in of_kind.items()}
        self._seconds_of_graph = sum(seconds_of[kind] for kind in self._kinds)
        self._seconds_of_model = self._seconds_of_graph if seconds is None else seconds

    def with_copies(self, copied: Copied) -> Search | None:
        """The search of the graph with copies; None: it has none."""
        steps = with_copies(self.steps, copied)
        return steps and Search(steps, self._rates, copied, self._seconds_of_model)

    def walls(self) -> tuple[tuple[str, int], ...]:
        """The operators that no region may hold, along no dimension, with how often they stand."""
        nodes = (step.node for step in self.steps.steps)
        walls = Counter(operator_name(node) for node in nodes if self._is_wall(node))
        return tuple(walls.most_common())

    def _is_wall(self, node: fx.Node) -> bool:
        """What makes tensors from nothing is none."""
        dims = range(max((t.ndim for t in tensors(node)), default=0))
        large = node.all_input_nodes and any(t.numel() > 1 for t in tensors(node))
        return bool(large) and all(self.steps.sources(node, d) is None for d in dims)

    def within_slowdown(self, most: float) -> Selection:
        """The selection of least memory whose slowdown is at most `most`."""
        best = self.within_memory(max(self.steps.peaks))
        low, high, least = 0, best.peak, best.peak
        for _ in range(HALVINGS):
            budget = (low + high) // 2
            found = self.within_memory(budget)
            least = min(least, found.peak)
            if found.slowdown <= most and found.peak < best.peak:
                best, high = found, found.peak
            else:
                low = budget
            if high - low <= high // 100:
                break
        # a larger budget may take longer, and then halving turns away from the smaller ones
        for part in range(1, BETWEEN) if least < best.peak else ():
            found = self.within_memory(least + (best.peak - least) * part // BETWEEN)
            if found.slowdown <= most and found.peak < best.peak:
                return found
        return best

    def within_memory(self, budget: int) -> Selection:
        """The cheapest selection that fits `budget` bytes or, where none does, the one that comes
        closest."""
        choices: list[Choice] = []
        replaced: set[int] = set()  # places whose regions gave way to one that holds more
        while True:
            peaks = self._peaks(choices)
            peak = max(peaks)
            if peak <= budget:
                break
            place = peaks.index(peak)
            found = self._choose(place, budget, choices)
            if (found is None or found.peak > budget) and place not in replaced:
                replaced.add(place)
                wider = self._choose(place, budget, ())
                if wider is not None and wider.peak <= budget:
                    first = wider.candidates[0]
                    choices = [one for one in choices if not one.holds(first.lo, first.hi)]
                    found = wider
            if found is None or found.peak >= peak:
                break
            budget = max(budget, found.peak)
            choices.append(self._alike(found, budget, choices))
        choices = [self._coarsest(choice, peak) for choice in choices]
        added = sum(choice.added_seconds for choice in choices for _ in choice.candidates)
        slowdown = (self._seconds_of_graph + added) / self._seconds_of_model - 1
        return Selection(tuple(choices), peak, slowdown)

    def _peaks(self, choices: Sequence[Choice]) -> list[int]:
        """The live bytes at each step; those of a choice's steps stand at the largest alone."""
        peaks = list(self.steps.peaks)
        for choice in choices:
            for found in choice.candidates:
                peak = found.peak(choice.chunks)
                peaks[found.lo : found.hi + 1] = [0] * (found.hi + 1 - found.lo)
                peaks[found.place if peak == found.beside else found.hi] = peak
        return peaks

    def _coarsest(self, choice: Choice, peak: int) -> Choice:
        """The choice in no more chunks than `peak` needs: another region may be what holds it."""
        chunks = max(found.chunks_for(peak) or choice.chunks for found in choice.candidates)
        added = self._added(choice.candidates[0], chunks)
        return Choice(choice.candidates, chunks, added)

    def _choose(self, place: int, budget: int, taken: Sequence[Choice]) -> Choice | None:
        """The cheapest candidate at a step that fits; if none does, the one of least memory."""
        found = self._candidates_at(place)
        free = [c for c in found if not any(other.holds(c.lo, c.hi) for other in taken)]
        fitting = [(c, n) for c in free if (n := c.chunks_for(budget)) is not None]
        if not fitting and free:
            least = min(free, key=lambda c: c.peak(c.most))
            fitting = [(least, least.most)]
        choices = (Choice((c,), n, self._added(c, n)) for c, n in fitting)
        return min(choices, key=lambda choice: choice.added_seconds, default=None)

    def _added(self, candidate: Candidate, chunks: int) -> float:
        """The seconds that so many chunks add: those of the operators, of writing outputs, and of
        the turns of the loop."""
        costs = map(self._cost, candidate.flow.operators)
        added = sum(cost.seconds(chunks) - cost.seconds(1) for cost in costs)
        turns = chunks * self._rates.slice_seconds
        return added + candidate.copied / self._rates.bytes_per_s + turns

    def _cost(self, op: SlicedOperator) -> Cost:
        step = self.steps.steps[self.steps.position[op.node]]
        key = step.signature, op.dim
        if key not in self._costs:
            self._costs[key] = Cost.of(op, step.flops, self._rates)
        return self._costs[key]

    def _alike(self, choice: Choice, budget: int, taken: Sequence[Choice]) -> Choice:
        """The choice, with the same candidate wherever the same operators stand and need it too."""
        first = choice.candidates[0]
        kinds = self._kinds[first.lo : first.hi + 1]
        for lo in range(len(self._kinds) - len(kinds) + 1):
            hi = lo + len(kinds) - 1
            if self._kinds[lo] != kinds[0] or self._kinds[lo : hi + 1] != kinds:
                continue
            if any(one.holds(lo, hi) for one in (choice, *taken)):
                continue
            if max(self.steps.peaks[lo : hi + 1]) <= budget:
                continue
            other = self._candidate_in(lo, hi, first.flow.end.dim)
            if other is not None and other.peak(choice.chunks) <= budget:
                choice = replace(choice, candidates=(*choice.candidates, other))
        return choice

    def _seconds(self, step: Step) -> float:
        """The predicted time of an operator."""
        rates, count = self._rates, sum(map(nbytes, (step.node, *arguments(step.node))))
        return rates.launch_seconds + max(step.flops / rates.flops_per_s, count / rates.bytes_per_s)
