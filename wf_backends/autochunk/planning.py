"""From a captured graph and a budget to a plan and the module that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import commonprefix

from torch import fx

from wf_backends.autochunk.cost import Rates, measure_rates
from wf_backends.autochunk.lower import Lowered, find_region, lower
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.region import Region, region_of, slice_length
from wf_backends.autochunk.select import Choice, Search, Selection
from wf_backends.graph import Budget, Captured, Copied, Effects, read_steps, with_copies

FORMS: tuple[Copied, ...] = ("", "masks", "norms")  # of the graph, in the order they are tried
SHARES = (1, 0.95, 0.9, 0.8, 0.6, 0)  # of the budget to search for, until what is built fits it


@dataclass(frozen=True)
class _Form:
    """A form of the graph and what was selected for it."""

    copied: Copied
    graph: fx.Graph
    search: Search
    found: Selection


def find_plan(
    captured: Captured, before: int, budget: Budget, rates: Rates | None = None
) -> tuple[ChunkPlan, Lowered]:
    """The cheapest plan within the budget, for a model that needs `before` bytes unchunked.

    The plan has no regions where the model itself fits, or where none needs less than it. What is
    computed from little is copied for its readers only where that is needed. `rates` are those of
    the device that runs it; None: measured here.

    Raises ValueError where none fits, with the plan that comes closest.
    """
    effects, rates = Effects(), rates or measure_rates(*captured.main_kind)
    limit = budget.bytes(before)
    plain = Search(captured.graph, effects, rates)
    model = ChunkPlan(captured.fingerprint, (), before, before, 0.0, plain.walls())
    if not plain.steps.steps or (limit is not None and before <= limit):
        return model, lower(captured.graph, (), effects)
    forms: list[_Form] = []
    for copied in FORMS[:2] if limit is None else FORMS:
        graph = with_copies(captured.graph, plain.steps, copied) if copied else captured.graph
        if graph is None:
            continue
        search = Search(graph, effects, rates, plain.seconds) if copied else plain
        forms.append(_Form(copied, graph, search, _select(search, limit, budget)))
        if limit is not None and _fits(forms[-1].found, limit, budget):
            plan, lowered = _built(forms[-1], model, limit, effects)
            if _fits(plan, limit, budget):
                return plan, lowered
    best = min(forms, key=lambda form: _badness(form.found, limit, budget))
    plan, lowered = _built(best, model, limit, effects)
    plan = plan if plan.peak < before else model
    if limit is not None:
        _check_fits(plan, limit, budget)
    return plan, lowered


def _select(search: Search, limit: int | None, budget: Budget) -> Selection:
    """The selection that fits or, where none does, that needs least memory."""
    if limit is None:
        return search.within_slowdown(budget.slowdown)
    found = search.within_memory(limit)
    return found if found.peak <= limit else search.within_memory(0)


def _fits(found: Selection | ChunkPlan, limit: int, budget: Budget) -> bool:
    return found.peak <= limit and found.slowdown <= budget.slowdown


def _badness(found: Selection, limit: int | None, budget: Budget) -> tuple[float, float]:
    """What is least for the better of two: time within the memory, or memory in time."""
    if limit is None:
        return max(found.slowdown, budget.slowdown), found.peak
    return max(found.peak, limit), found.slowdown


def _built(
    form: _Form, model: ChunkPlan, limit: int | None, effects: Effects
) -> tuple[ChunkPlan, Lowered]:
    """The plan of a form. Where what is built needs more than was predicted, it is selected again
    for less, until it fits."""
    tried: list[tuple[ChunkPlan, Lowered]] = []
    for share in SHARES if limit is not None and form.found.peak <= limit else SHARES[:1]:
        found = form.found
        if limit is not None and share < 1:
            found = form.search.within_memory(int(share * limit))
        lowered = lower(form.graph, [_window(form.search, c) for c in found.choices], effects)
        plan = replace(_planned(form, found, model), peak=max(lowered.peaks))
        tried.append((plan, lowered))
        if limit is None or plan.peak <= limit:
            break
    return min(tried, key=lambda pair: pair[0].peak)


def _planned(form: _Form, found: Selection, model: ChunkPlan) -> ChunkPlan:
    """The plan of a selection, with the predicted peak."""
    parts = tuple(_part(form.search, choice) for choice in found.choices)
    return replace(
        model, regions=parts, peak=found.peak, slowdown=found.slowdown, copied=form.copied
    )


def use_plan(captured: Captured, plan: ChunkPlan) -> Lowered:
    """The module of a plan that was made before.

    Raises ValueError where it was made for another model or other inputs, or its regions overlap.
    """
    if plan.fingerprint != captured.fingerprint:
        raise ValueError(
            f"plan was made for another model or other input shapes: its graph is "
            f"{plan.fingerprint}, this one {captured.fingerprint}; leave plan out to search anew"
        )
    graph, effects = captured.graph, Effects()
    steps = read_steps(graph, effects)
    if plan.copied and (copies := with_copies(graph, steps, plan.copied)):
        graph, steps = copies, read_steps(copies, effects)
    windows = [find_region(steps, part) for part in plan.regions]
    _check_apart(plan, [nodes for nodes, _ in windows])
    return lower(graph, windows, effects)


def _check_apart(plan: ChunkPlan, windows: list[list[fx.Node]]) -> None:
    """Refuse regions that hold the same operator."""
    owners: dict[fx.Node, ChunkedPart] = {}
    for part, nodes in zip(plan.regions, windows, strict=True):
        other = next((owners[node] for node in nodes if node in owners), None)
        if other is not None:
            raise ValueError(
                f"the plan's regions {other.first} to {other.last} and {part.first} to {part.last} "
                "overlap"
            )
        owners |= dict.fromkeys(nodes, part)


def _window(search: Search, choice: Choice) -> tuple[list[fx.Node], Region]:
    found = choice.candidate
    steps = search.steps.steps[found.lo : found.hi + 1]
    length = slice_length(found.flow, choice.chunks)
    region = region_of(found.flow, length, found.overwritten)
    return [step.node for step in steps], region


def _part(search: Search, choice: Choice) -> ChunkedPart:
    flow, steps = choice.candidate.flow, search.steps.steps
    overwritten = choice.candidate.overwritten
    return ChunkedPart(
        first=steps[choice.candidate.lo].node.name,
        last=steps[choice.candidate.hi].node.name,
        dim=flow.end.dim,
        length=slice_length(flow, choice.chunks),
        rows=flow.rows,
        operators=len(flow.operators),
        where=_where([op.node for op in flow.operators]),
        overwritten=overwritten.name if overwritten else "",
    )


def _where(nodes: list[fx.Node]) -> str:
    """The innermost module to which all these operators belong."""
    stacks = (node.meta.get("nn_module_stack") for node in nodes)
    paths = [[path for path, _ in stack.values()] for stack in stacks if stack]
    return next(reversed(commonprefix(paths)), "") or "the model"


class BudgetError(ValueError):
    """A budget that no plan fits."""


def _check_fits(plan: ChunkPlan, limit: int, budget: Budget) -> None:
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
