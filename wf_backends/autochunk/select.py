"""Which regions to chunk, and into how many slices, to fit a budget at the least slowdown.

The loop of arXiv 2401.10652, section 3.4: while the peak is above the budget, take the step at the
peak, choose the cheapest of the regions around it with which these steps fit, and choose it again
in every layer that is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from wf_backends.autochunk.cost import Rates, operator_seconds
from wf_backends.autochunk.search import Candidate, candidate_in, candidates_at, collapse
from wf_backends.graph import (
    Effects,
    Step,
    Steps,
    arguments,
    described,
    operator_name,
    profile,
    read_steps,
    sources,
    tensors,
)


@dataclass(frozen=True)
class Choice:
    """A candidate in so many chunks, and the seconds that this adds to a run."""

    candidate: Candidate
    chunks: int
    added_seconds: float

    @property
    def peak(self) -> int:
        """The bytes that the candidate's steps need."""
        return self.candidate.peak(self.chunks)


@dataclass(frozen=True)
class Selection:
    """What the search found: no two choices overlap. `seconds` is the predicted time of the graph
    unchunked, `model_seconds` that of the model (a graph with copies takes longer), `peak` the
    predicted peak in bytes, before regions are built."""

    choices: tuple[Choice, ...]
    peak: int
    seconds: float
    model_seconds: float

    @property
    def slowdown(self) -> float:
        added = sum(choice.added_seconds for choice in self.choices)
        return (self.seconds + added) / self.model_seconds - 1


class Search:
    """Finds selections for one graph; what it knows of a step's candidates serves every budget.

    `model_seconds` is the predicted time of the model, if not that of the graph.
    """

    def __init__(
        self,
        graph: fx.Graph,
        effects: Effects,
        rates: Rates,
        model_seconds: float | None = None,
    ) -> None:
        self.steps: Steps = read_steps(graph, effects)
        self._rates = rates
        self._candidates: dict[int, list[Candidate]] = {}
        self._places: dict[tuple[int, int, int], Candidate | None] = {}
        self._kinds = _kinds(self.steps.steps)
        self.seconds = sum(self._step_seconds(step) for step in self.steps.steps)
        self._model_seconds = model_seconds or self.seconds

    def walls(self) -> tuple[tuple[str, int], ...]:
        """The operators that no region may hold, along no dimension, with how often they stand."""
        seen: dict[int, bool] = {}
        walls: Counter[str] = Counter()
        for kind, step in zip(self._kinds, self.steps.steps, strict=True):
            if kind not in seen:
                seen[kind] = _is_wall(step.node)
            if seen[kind]:
                walls[operator_name(step.node)] += 1
        return tuple(walls.most_common())

    def within_slowdown(self, most: float, halvings: int = 8) -> Selection:
        """The selection of least memory whose slowdown is at most `most`."""
        best = self.within_memory(max(self.steps.peaks))
        low, high = 0, best.peak
        for _ in range(halvings):
            budget = (low + high) // 2
            found = self.within_memory(budget)
            if found.slowdown <= most and found.peak < best.peak:
                best, high = found, found.peak
            else:
                low = budget
            if high - low <= high // 100:
                break
        return best

    def within_memory(self, budget: int) -> Selection:
        """The cheapest selection that fits `budget` bytes or, where none does, the one that comes
        closest."""
        groups: list[list[Choice]] = []
        replaced: set[int] = set()  # places whose regions gave way to one that holds more
        while True:
            choices = [choice for alike in groups for choice in alike]
            order = self._collapsed(choices)
            peaks = profile(order, self.steps.outputs)
            peak = max(peaks)
            if peak <= budget:
                break
            step = order[peaks.index(peak)]
            place = self.steps.position[step.node]
            found = self._choose(place, budget, choices)
            if (found is None or found.peak > budget) and place not in replaced:
                replaced.add(place)
                wider = self._choose(place, budget, ())
                if wider is not None and wider.peak <= budget:
                    groups = [alike for alike in groups if not _overlap(wider, alike)]
                    found, choices = wider, [choice for alike in groups for choice in alike]
            if found is None or found.peak >= peak:
                break
            budget = max(budget, found.peak)
            groups.append(self._alike(found, budget, choices))
        coarse = (choice for alike in groups for choice in self._coarsest(alike, peak))
        return Selection(tuple(coarse), peak, self.seconds, self._model_seconds)

    def _coarsest(self, alike: list[Choice], peak: int) -> list[Choice]:
        """The choices of layers that are alike, in no more chunks than `peak` needs: another
        region may be what holds it."""
        needed = [choice.candidate.chunks_for(peak) or choice.chunks for choice in alike]
        return [self._choice(choice.candidate, max(needed)) for choice in alike]

    def _choose(self, place: int, budget: int, taken: Sequence[Choice]) -> Choice | None:
        """The cheapest candidate at a step that fits; if none does, the one of least memory."""
        if place not in self._candidates:
            self._candidates[place] = list(candidates_at(self.steps, place))
        free = [c for c in self._candidates[place] if not _taken(c.lo, c.hi, taken)]
        fitting = [(c, n) for c in free if (n := c.chunks_for(budget)) is not None]
        if not fitting:
            least = min(free, key=lambda c: c.peak(c.most), default=None)
            return None if least is None else self._choice(least, least.most)
        return min((self._choice(c, n) for c, n in fitting), key=lambda c: c.added_seconds)

    def _choice(self, candidate: Candidate, chunks: int) -> Choice:
        added = 0.0
        for op in candidate.flow.operators:
            flops = self.steps.steps[self.steps.position[op.node]].flops
            whole = operator_seconds(op, flops, self._rates, 1)
            added += operator_seconds(op, flops, self._rates, chunks) - whole
        return Choice(candidate, chunks, added + candidate.copied / self._rates.bytes_per_s)

    def _alike(self, choice: Choice, budget: int, taken: Sequence[Choice]) -> list[Choice]:
        """The choice, and the same one wherever the same operators stand and need it too."""
        found = [choice]
        first = choice.candidate
        kinds = self._kinds[first.lo : first.hi + 1]
        for lo in range(len(self._kinds) - len(kinds) + 1):
            hi = lo + len(kinds) - 1
            if self._kinds[lo] != kinds[0] or self._kinds[lo : hi + 1] != kinds:
                continue
            if max(self.steps.peaks[lo : hi + 1]) <= budget or _taken(lo, hi, (*found, *taken)):
                continue
            other = self._candidate_in(lo, hi, first.flow.end.dim)
            if other is not None and other.peak(choice.chunks) <= budget:
                found.append(replace(choice, candidate=other))
        return found

    def _candidate_in(self, lo: int, hi: int, dim: int) -> Candidate | None:
        place = (lo, hi, dim)
        if place not in self._places:
            self._places[place] = candidate_in(self.steps, *place)
        return self._places[place]

    def _collapsed(self, choices: Sequence[Choice]) -> list[Step]:
        """The graph's steps with every choice as one step."""
        order: list[Step] = []
        done = 0
        for choice in sorted(choices, key=lambda c: c.candidate.lo):
            found = choice.candidate
            region = replace(found.region, temporary=found.inner(choice.chunks))
            order += self.steps.steps[done : found.lo]
            order += collapse(self.steps, found.lo, found.hi, found.flow, region)
            done = found.hi + 1
        return order + self.steps.steps[done:]

    def _step_seconds(self, step: Step) -> float:
        count = sum(t.nbytes for node in (step.node, *arguments(step.node)) for t in tensors(node))
        return self._rates.seconds(step.flops, count)


def _is_wall(node: fx.Node) -> bool:
    """Whether it has no rule along any dimension; what makes tensors from nothing is none."""
    dims = range(max((t.ndim for t in tensors(node)), default=0))
    large = any(t.numel() > 1 for t in tensors(node))
    return large and bool(node.all_input_nodes) and all(sources(node, d) is None for d in dims)


def _taken(lo: int, hi: int, choices: Sequence[Choice]) -> bool:
    return any(lo <= c.candidate.hi and c.candidate.lo <= hi for c in choices)


def _overlap(choice: Choice, others: Sequence[Choice]) -> bool:
    return _taken(choice.candidate.lo, choice.candidate.hi, others)


def _kinds(steps: Sequence[Step]) -> list[int]:
    """A number for each step: equal where operator and shapes are."""
    known: dict[str, int] = {}
    return [known.setdefault(_kind(step.node), len(known)) for step in steps]


def _kind(node: fx.Node) -> str:
    args, kwargs = fx.map_arg((node.args, node.kwargs), described)
    return f"{node.target} {args} {kwargs}"
