"""From a captured graph and a budget to a plan and the module that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from os.path import commonprefix

from torch import fx

from wf_backends.autochunk.cost import Rates, measure_rates
from wf_backends.autochunk.lower import Lowered, find_region, lower
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.region import slice_length
from wf_backends.autochunk.select import Choice, Search, Selection
from wf_backends.graph import Budget, Captured, Copied, Effects, Steps, read_steps, with_copies

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
    budget = budget.in_bytes(before)
    effects, rates = Effects(), rates or measure_rates(*captured.main_kind)
    plain = Search(captured.graph, effects, rates)
    model = ChunkPlan(captured.fingerprint, (), before, before, 0.0, plain.walls())
    if not plain.steps.steps or _fits(model, budget):
        return model, lower(captured.graph, (), effects)
    forms: list[_Form] = []
    for copied in FORMS[:2] if budget.memory is None else FORMS:
        graph = with_copies(captured.graph, plain.steps, copied) if copied else captured.graph
        if graph is None:
            continue
        search = Search(graph, effects, rates, plain.seconds) if copied else plain
        forms.append(_Form(copied, graph, search, _select(search, budget)))
        if _fits(forms[-1].found, budget):
            plan, lowered = _built(forms[-1], model, budget, effects)
            if _fits(plan, budget):
                return plan, lowered
    best = min(forms, key=lambda form: _badness(form.found, budget))
    plan, lowered = _built(best, model, budget, effects)
    plan = plan if plan.peak < before else model
    _check_fits(plan, budget)
    return plan, lowered


def _select(search: Search, budget: Budget) -> Selection:
    """The selection that fits or, where none does, that needs least memory."""
    if budget.memory is None:
        return search.within_slowdown(budget.slowdown)
    found = search.within_memory(int(budget.memory))
    return found if found.peak <= budget.memory else search.within_memory(0)


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
    form: _Form, model: ChunkPlan, budget: Budget, effects: Effects
) -> tuple[ChunkPlan, Lowered]:
    """The plan of a form. Where what is built needs more than was predicted, it is selected again
    for less, until it fits."""
    tried: list[tuple[ChunkPlan, Lowered]] = []
    memory = inf if budget.memory is None else budget.memory
    found, steps = form.found, form.search.steps
    for share in SHARES if found.peak <= memory < inf else SHARES[:1]:
        if share < 1:
            found = form.search.within_memory(int(share * memory))
        parts = tuple(_part(steps, choice) for choice in found.choices)
        lowered = _lowered(form.graph, steps, parts, effects)
        plan = replace(model, regions=parts, slowdown=found.slowdown, copied=form.copied)
        tried.append((replace(plan, peak=lowered.peak), lowered))
        if lowered.peak <= memory:
            break
    return min(tried, key=lambda pair: pair[0].peak)


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
    return _lowered(graph, steps, plan.regions, effects)


def _lowered(
    graph: fx.Graph, steps: Steps, parts: tuple[ChunkedPart, ...], effects: Effects
) -> Lowered:
    """The graph with these regions; ValueError where two hold the same operator."""
    windows = [find_region(steps, part) for part in parts]
    owners: dict[fx.Node, ChunkedPart] = {}
    for part, (nodes, _) in zip(parts, windows, strict=True):
        other = next((owners[node] for node in nodes if node in owners), None)
        if other is not None:
            raise ValueError(
                f"the plan's regions {other.first} to {other.last} and {part.first} to {part.last} "
                "overlap"
            )
        owners |= dict.fromkeys(nodes, part)
    return lower(graph, windows, effects)


def _part(steps: Steps, choice: Choice) -> ChunkedPart:
    found = choice.candidate
    flow = found.flow
    return ChunkedPart(
        first=steps.steps[found.lo].node.name,
        last=steps.steps[found.hi].node.name,
        dim=flow.end.dim,
        length=slice_length(flow, choice.chunks),
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
