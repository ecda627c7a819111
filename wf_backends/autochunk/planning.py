"""Makes a plan, and the module that runs it, from a model and a budget. For a model on fake tensors
`memory_profiles` gives the memory at every operator."""

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
from wf_backends.autochunk.graph import (
    Budget,
    Captured,
    Copied,
    Effects,
    bind,
    capture,
    checked_budget,
    read_steps,
    register_containers,
    unchunked_peak,
    with_copies,
)
from wf_backends.autochunk.lower import Lowered, Profile, find_region, lower
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.region import Region, slice_length
from wf_backends.autochunk.select import Search, Selection

COPIES: tuple[Copied, ...] = ("", "masks", "norms")  # in the order in which they are tried
BUDGET_SHARES = (1, 0.95, 0.9, 0.8, 0.6, 0)  # to search for, until the built module fits the budget


@dataclass(frozen=True)
class Planned:
    """The forward for one form of inputs: its graph, its plan, and the module that runs it.

    `before` and `after` are the live bytes of activations at each operator with its module's path,
    of the model without slices and with them, where a chunk region is one operator.
    """

    captured: Captured
    plan: ChunkPlan
    lowered: Lowered

    @cached_property
    def before(self) -> Profile:
        return lower(self.captured.graph, (), Effects()).profile

    @property
    def after(self) -> Profile:
        return self.lowered.profile if self.plan.regions else self.before

    @staticmethod
    def by_module(profile: Profile) -> dict[str, int]:
        """Module path, with * for numbers -> the most live bytes at one of its operators."""
        peaks: dict[str, int] = {}
        for path, nbytes in profile:
            pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
            peaks[pattern] = max(nbytes, peaks.get(pattern, 0))
        return peaks


def find_plan(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    budget: Budget,
    rates: Rates | None = None,
    known: ChunkPlan | None = None,
    must_be_known: bool = False,
) -> Planned:
    """The cheapest plan within the budget; `known`, made before, if it is of the same graph.

    The plan has no regions if the model fits without, or if no plan needs less memory than it.
    `rates` are those of the device that runs the plan; None: they are measured on this one.

    Raises ValueError with the closest plan if none fits; with `must_be_known` also if `known` was
    made for another model or other inputs.
    """
    captured = capture(model, args, kwargs)
    if known is not None and known.fingerprint == captured.fingerprint:
        return _with_plan(captured, known)
    if known is not None and must_be_known:
        raise ValueError(
            f"plan was made for another model (its dtype or attention?) or other inputs (shapes, "
            f"use_cache?): its graph is {known.fingerprint}, this one {captured.fingerprint}; "
            f"leave plan out to search again"
        )
    before = unchunked_peak(model, args, kwargs)
    budget = budget.in_bytes(before)
    rates = rates or measure_rates(*captured.device_and_dtype)
    search = Search(read_steps(captured.graph, Effects()), rates)
    unchunked = ChunkPlan(captured.fingerprint, (), before, before, 0.0, search.walls())
    if not search.steps.steps or _fits(unchunked, budget):
        return Planned(captured, unchunked, lower(captured.graph, (), search.steps.effects))
    plan, lowered = _best_plan(search, unchunked, budget)
    plan = plan if plan.peak < before else unchunked
    _check_fits(plan, budget)
    return Planned(captured, plan, lowered)


def _best_plan(base: Search, unchunked: ChunkPlan, budget: Budget) -> tuple[ChunkPlan, Lowered]:
    """The plan that fits, or else the closest one; with copies only where none fits without."""
    tried: list[tuple[Search, Selection]] = []
    for copied in COPIES[:2] if budget.memory is None else COPIES:
        search = base.with_copies(copied) if copied else base
        if search is None:
            continue
        selection = _select(search, budget)
        tried.append((search, selection))
        if _fits(selection, budget):
            plan, lowered = _build_plan(search, selection, unchunked, budget)
            if _fits(plan, budget):
                return plan, lowered
    search, selection = min(tried, key=lambda pair: _distance(pair[1], budget))
    return _build_plan(search, selection, unchunked, budget)


def _select(search: Search, budget: Budget) -> Selection:
    """The selection that fits, or else the one of least memory."""
    if budget.memory is None:
        return search.within_slowdown(budget.slowdown)
    selection = search.within_memory(int(budget.memory))
    return selection if selection.peak <= budget.memory else search.within_slowdown(inf)


def _fits(plan: Selection | ChunkPlan, budget: Budget) -> bool:
    """Whether a plan keeps both limits; not if the least memory is searched for (None)."""
    if budget.memory is None:
        return False
    return plan.peak <= budget.memory and plan.slowdown <= budget.slowdown


def _distance(selection: Selection, budget: Budget) -> tuple[float, float]:
    """A key that is smaller for the better selection: by what exceeds the budget, then by slowdown
    (if the least memory is searched for, by the peak)."""
    if budget.memory is None:
        return max(selection.slowdown, budget.slowdown), selection.peak
    return max(selection.peak, budget.memory), selection.slowdown


def _build_plan(
    search: Search, selection: Selection, unchunked: ChunkPlan, budget: Budget
) -> tuple[ChunkPlan, Lowered]:
    """The plan of a selection, and its module. While the module needs more memory than the budget
    (more than predicted), selects again for a smaller budget."""
    tried: list[tuple[ChunkPlan, Lowered]] = []
    memory = inf if budget.memory is None else budget.memory
    for share in BUDGET_SHARES if selection.peak <= memory < inf else BUDGET_SHARES[:1]:
        if share < 1:
            selection = search.within_memory(int(share * memory))
        regions = [
            choice.candidate.region(slice_length(choice.candidate.flow, choice.num_slices))
            for choice in selection.choices
        ]
        parts = tuple(map(_part, regions))
        lowered = lower(search.steps.graph, regions, search.steps.effects)
        plan = replace(unchunked, regions=parts, peak=lowered.peak, slowdown=selection.slowdown)
        tried.append((replace(plan, copied=search.copied), lowered))
        if lowered.peak <= memory:
            break
    return min(tried, key=lambda pair: pair[0].peak)


def _with_plan(captured: Captured, plan: ChunkPlan) -> Planned:
    """The forward with a plan of its graph. `peak` becomes what the regions need: their lengths may
    have been edited. Raises ValueError if two regions overlap."""
    steps = read_steps(captured.graph, Effects())
    if plan.copied:
        steps = with_copies(steps, plan.copied) or steps
    regions = [find_region(steps, part) for part in plan.regions]
    windows = (region.window for region in regions)
    for left, right in pairwise(sorted(windows, key=lambda nodes: steps.position[nodes[0]])):
        if right[0] in left:
            raise ValueError(
                f"the plan's regions {left[0]} to {left[-1]} and {right[0]} to {right[-1]} overlap"
            )
    lowered = lower(steps.graph, regions, steps.effects)
    if plan.regions or plan.saved:
        plan = replace(plan, peak=lowered.peak)
    return Planned(captured, plan, lowered)


def _part(region: Region) -> ChunkedPart:
    flow = region.flow
    return ChunkedPart(
        first=region.window[0].name,
        last=region.window[-1].name,
        dim=flow.end.dim,
        length=region.length,
        rows=flow.rows,
        operators=len(flow.operators),
        where=_common_module([op.node for op in flow.operators]),
        overwritten=region.overwritten.name if region.overwritten else "",
    )


def _common_module(nodes: list[fx.Node]) -> str:
    """The path of the innermost module to which all these operators belong."""
    stacks = (node.meta.get("nn_module_stack") for node in nodes)
    paths = [[path for path, _ in stack.values()] for stack in stacks if stack]
    return (commonprefix(paths) or [""])[-1] or "the model"


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


Profiles = Planned  # the public name


def memory_profiles(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
    rates: Rates | None = None,
) -> Profiles:
    """The plan that `autochunk` would make, without computing: the model may be on fake tensors.

    Arguments and errors as `autochunk`; `rates` of the device that will run it, if not this one.
    """
    budget = checked_budget(max_memory, max_slowdown)
    register_containers()
    return find_plan(model, *bind(model, (), dict(kwargs)), budget, rates)


def longest(fits: Callable[[int], bool], step: int, known: int = 0, within: float = 0.02) -> int:
    """The largest multiple of `step` that fits, to within a share `within` of it; 0 if none does.

    `fits` must hold for all smaller lengths, too. `known`, a multiple of `step`, is known to fit.
    """
    low, high = known, max(step, 2 * known)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(step, int(within * low)):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
