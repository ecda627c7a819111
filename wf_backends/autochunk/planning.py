"""From a model and a budget to a plan and the module that runs it; or, for a model that is only
looked at, to the memory of every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from os.path import commonprefix
from typing import Any

from torch import fx, nn

from wf_backends.autochunk.cost import Rates, measure_rates
from wf_backends.autochunk.lower import Lowered, Profile, find_region, lower
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.region import slice_length
from wf_backends.autochunk.search import Candidate
from wf_backends.autochunk.select import Search, Selection
from wf_backends.graph import (
    Budget,
    Captured,
    Copied,
    Effects,
    Steps,
    bind,
    capture,
    checked_budget,
    read_steps,
    register_containers,
    unchunked_peak,
    with_copies,
)

FORMS: tuple[Copied, ...] = ("", "masks", "norms")  # of the graph, in the order they are tried
SHARES = (1, 0.95, 0.9, 0.8, 0.6, 0)  # of the budget to search for, until what is built fits it


@dataclass(frozen=True)
class Planned:
    """A forward for one form of inputs: its graph, its plan, and the module that runs it."""

    captured: Captured
    plan: ChunkPlan
    lowered: Lowered


def find_plan(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    budget: Budget,
    rates: Rates | None = None,
) -> Planned:
    """The cheapest plan within the budget.

    The plan has no regions where the model itself fits, or where none needs less than it. `rates`
    are those of the device that runs it; None: measured here.

    Raises ValueError where none fits, with the plan that comes closest.
    """
    captured, before = capture(model, args, kwargs), unchunked_peak(model, args, kwargs)
    budget = budget.in_bytes(before)
    rates = rates or measure_rates(*captured.device_and_dtype)
    search = Search(read_steps(captured.graph, Effects()), rates)
    whole = ChunkPlan(captured.fingerprint, (), before, before, 0.0, search.walls())
    if not search.steps.steps or _fits(whole, budget):
        return Planned(captured, whole, lower(captured.graph, (), search.steps.effects))
    plan, lowered = _best(search, whole, budget)
    plan = plan if plan.peak < before else whole
    _check_fits(plan, budget)
    return Planned(captured, plan, lowered)


def _best(plain: Search, whole: ChunkPlan, budget: Budget) -> tuple[ChunkPlan, Lowered]:
    """The plan that fits or comes closest. What is computed from little is copied for its readers
    only where that is needed."""
    tried: list[tuple[Search, Selection]] = []
    for copied in FORMS[:2] if budget.memory is None else FORMS:
        search = plain.with_copies(copied) if copied else plain
        if search is None:
            continue
        found = _select(search, budget)
        tried.append((search, found))
        if _fits(found, budget):
            built = _built(search, found, whole, budget)
            if _fits(built[0], budget):
                return built
    search, found = min(tried, key=lambda pair: _badness(pair[1], budget))
    return _built(search, found, whole, budget)


def _select(search: Search, budget: Budget) -> Selection:
    """The selection that fits or, where none does, that needs least memory."""
    if budget.memory is None:
        return search.within_slowdown(budget.slowdown)
    found = search.within_memory(int(budget.memory))
    return found if found.peak <= budget.memory else search.within_slowdown(inf)


def _fits(found: Selection | ChunkPlan, budget: Budget) -> bool:
    """Whether there is nothing better to look for."""
    enough = budget.memory is not None and found.peak <= budget.memory
    return enough and found.slowdown <= budget.slowdown


def _badness(found: Selection, budget: Budget) -> tuple[float, float]:
    """What is least for the better of two: time within the memory, or memory in time."""
    if budget.memory is None:
        return max(found.slowdown, budget.slowdown), found.peak
    return max(found.peak, budget.memory), found.slowdown


def _built(
    search: Search, found: Selection, whole: ChunkPlan, budget: Budget
) -> tuple[ChunkPlan, Lowered]:
    """The plan of a selection. Where what is built needs more than was predicted, it is selected
    again for less, until it fits."""
    tried: list[tuple[ChunkPlan, Lowered]] = []
    memory = inf if budget.memory is None else budget.memory
    for share in SHARES if found.peak <= memory < inf else SHARES[:1]:
        if share < 1:
            found = search.within_memory(int(share * memory))
        parts = tuple(
            _part(search.steps, candidate, choice.chunks)
            for choice in found.choices
            for candidate in choice.candidates
        )
        lowered = _lowered(search.steps, parts)
        plan = replace(whole, regions=parts, slowdown=found.slowdown, copied=search.copied)
        tried.append((replace(plan, peak=lowered.peak), lowered))
        if lowered.peak <= memory:
            break
    return min(tried, key=lambda pair: pair[0].peak)


def use_plan(model: nn.Module, args: tuple, kwargs: dict[str, Any], plan: ChunkPlan) -> Planned:
    """The forward with a plan that was made before.

    Raises ValueError where it was made for another model or other inputs, or its regions overlap.
    """
    captured = capture(model, args, kwargs)
    if plan.fingerprint != captured.fingerprint:
        raise ValueError(
            f"plan was made for another model or other input shapes: its graph is "
            f"{plan.fingerprint}, this one {captured.fingerprint}; leave plan out to search anew"
        )
    steps = read_steps(captured.graph, Effects())
    if plan.copied:
        steps = with_copies(steps, plan.copied) or steps
    return Planned(captured, plan, _lowered(steps, plan.regions))


def _lowered(steps: Steps, parts: tuple[ChunkedPart, ...]) -> Lowered:
    """The graph with these regions; ValueError where two hold the same operator."""
    windows = [find_region(steps, part) for part in parts]
    ordered = sorted((nodes for nodes, _ in windows), key=lambda nodes: steps.position[nodes[0]])
    for one, other in pairwise(ordered):
        if other[0] in one:
            raise ValueError(
                f"the plan's regions {one[0]} to {one[-1]} and {other[0]} to {other[-1]} overlap"
            )
    return lower(steps.graph, windows, steps.effects)


def _part(steps: Steps, found: Candidate, chunks: int) -> ChunkedPart:
    flow = found.flow
    return ChunkedPart(
        first=steps.steps[found.lo].node.name,
        last=steps.steps[found.hi].node.name,
        dim=flow.end.dim,
        length=slice_length(flow, chunks),
        rows=flow.rows,
        operators=len(flow.operators),
        where=_where([op.node for op in flow.operators]),
        overwritten=found.overwritten.name if found.overwritten else "",
    )


def _where(nodes: list[fx.Node]) -> str:
    """The innermost module to which all these operators belong."""
    stacks = (node.meta.get("nn_module_stack") for node in nodes)
    paths = [[path for path, _ in stack.values()] for stack in stacks if stack]
    return next(reversed(commonprefix(paths)), "") or "the model"


class BudgetError(ValueError):
    """A budget that no plan fits."""


def _check_fits(plan: ChunkPlan, budget: Budget) -> None:
    limit = budget.memory
    if limit is None:
        return
    if plan.peak > limit:
        raise BudgetError(
            f"max_memory={limit} bytes: no plan fits. The closest one needs {plan.peak} bytes "
            f"(unchunked: {plan.peak_before}) at a predicted slowdown of {plan.slowdown:.1%}:\n"
            f"{plan.explain()}"
        )
    if plan.slowdown > budget.slowdown:
        raise BudgetError(
            f"max_memory={limit} bytes fits only with a predicted slowdown of {plan.slowdown:.1%}, "
            f"more than max_slowdown={budget.slowdown}; raise one of them. max_memory=None finds "
            f"the least memory within max_slowdown"
        )


@dataclass(frozen=True)
class Profiles(Planned):
    """A plan, and the live bytes of activations at each operator with its module's path: `before`
    as the model is, `after` with a chunk region as one operator."""

    @cached_property
    def before(self) -> Profile:
        return lower(self.captured.graph, (), Effects()).profile

    @property
    def after(self) -> Profile:
        return self.lowered.profile if self.plan.regions else self.before


def memory_profiles(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
    rates: Rates | None = None,
) -> Profiles:
    """What `autochunk` would do to a model, which may lie on fake tensors: nothing is computed.

    Arguments and errors as `autochunk`; `rates` of the device that is to run it, if not this one.
    """
    budget = checked_budget(max_memory, max_slowdown)
    register_containers()
    planned = find_plan(model, *bind(model, (), dict(kwargs)), budget, rates)
    return Profiles(planned.captured, planned.plan, planned.lowered)


def longest(fits: Callable[[int], bool], step: int, known: int = 0, within: float = 0.02) -> int:
    """The largest multiple of `step` that fits, to within a share of it; 0 if none does.

    What fits has to fit when it is shorter, too; `known`, a multiple of `step`, is known to fit.
    """
    low, high = known, max(step, 2 * known)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(step, int(within * low)):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
