"""From a captured graph and a budget to a plan and the module that runs it."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from wf_backends.autochunk.copies import Copied, with_copies
from wf_backends.autochunk.cost import measure_rates
from wf_backends.autochunk.lower import Lowered, lower
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.region import slice_length
from wf_backends.autochunk.select import Choice, Search, Selection
from wf_backends.graph import Budget, Captured, Effects

COPIED: tuple[Copied, ...] = ("masks", "norms")  # tried in turn where the graph does not fit
SHARES = (1, 0.95, 0.9, 0.8, 0.6, 0)  # of the budget to search for, until what is built fits it


def find_plan(captured: Captured, before: int, budget: Budget) -> tuple[ChunkPlan, Lowered]:
    """The cheapest plan within the budget, for a model that needs `before` bytes unchunked.

    The plan has no regions where the model itself fits, or where none needs less than it. What is
    computed from little is copied for its readers only where that is needed.

    Raises ValueError where none fits, with the plan that comes closest.
    """
    effects, rates = Effects(), measure_rates(*captured.main_kind)
    search = Search(captured.graph, effects, rates)
    walls, limit = search.walls(), budget.bytes(before)
    unchunked = ChunkPlan(captured.fingerprint, (), before, before, 0.0, walls)
    if limit is not None and before <= limit:
        return unchunked, lower(captured.graph, (), effects)
    plan, lowered = _best(search, unchunked, captured.graph, effects, budget)
    for what in COPIED[:1] if limit is None else COPIED:
        if limit is not None and plan.peak <= limit and plan.slowdown <= budget.slowdown:
            break
        graph = with_copies(captured.graph, effects, what)
        if graph is not None:
            other = Search(graph, effects, rates, search.seconds)
            model = replace(unchunked, copied=what)
            found = _best(other, model, graph, effects, budget)
            plan, lowered = min((plan, lowered), found, key=lambda each: _badness(each[0], budget))
    if limit is None:
        return (plan if plan.peak < before else unchunked), lowered
    _check_fits(plan, limit, budget)
    return plan, lowered


def _best(
    search: Search, unchunked: ChunkPlan, graph: fx.Graph, effects: Effects, budget: Budget
) -> tuple[ChunkPlan, Lowered]:
    """The plan for a form of the graph that fits the budget best."""

    def built(found: Selection) -> tuple[ChunkPlan, Lowered]:
        parts = tuple(_part(search, choice) for choice in found.choices)
        lowered = lower(graph, parts, effects)
        peak = max(lowered.peaks)
        return replace(unchunked, regions=parts, peak=peak, slowdown=found.slowdown), lowered

    limit = budget.bytes(unchunked.peak_before)
    if limit is None:
        return built(search.within_slowdown(budget.slowdown))
    tried: list[tuple[ChunkPlan, Lowered]] = []
    found = search.within_memory(limit)
    for share in SHARES if found.peak <= limit else SHARES[-1:]:
        tried.append(built(search.within_memory(int(share * limit))))
        if tried[-1][0].peak <= limit:
            break
    return min(tried, key=lambda pair: pair[0].peak)


def _badness(plan: ChunkPlan, budget: Budget) -> tuple[float, float]:
    """What is least for the better of two plans: time within the memory, or memory in time."""
    limit = budget.bytes(plan.peak_before)
    if limit is None:
        return max(plan.slowdown, budget.slowdown), plan.peak
    return max(plan.peak, limit), plan.slowdown


def use_plan(captured: Captured, plan: ChunkPlan) -> Lowered:
    """The module of a plan that was made before.

    Raises ValueError where it was made for another model or other inputs.
    """
    if plan.fingerprint != captured.fingerprint:
        raise ValueError(
            f"plan was made for another model or other input shapes: its graph is "
            f"{plan.fingerprint}, this one {captured.fingerprint}; leave plan out to search anew"
        )
    effects = Effects()
    graph = with_copies(captured.graph, effects, plan.copied) if plan.copied else captured.graph
    return lower(graph or captured.graph, plan.regions, effects)


def _part(search: Search, choice: Choice) -> ChunkedPart:
    flow = choice.candidate.flow
    steps = search.steps.steps
    return ChunkedPart(
        first=steps[choice.candidate.lo].node.name,
        last=steps[choice.candidate.hi].node.name,
        dim=flow.end.dim,
        length=slice_length(flow, choice.chunks),
        rows=flow.rows,
        operators=len(flow.operators),
        where=_where([op.node for op in flow.operators]),
    )


def _where(nodes: list[fx.Node]) -> str:
    """The innermost module to which all these operators belong."""
    paths = [
        list(n.meta["nn_module_stack"].values()) for n in nodes if n.meta.get("nn_module_stack")
    ]
    common = ""
    for level in zip(*paths, strict=False):
        if any(path != level[0] for path in level):
            break
        common = level[0][0]
    return common or "the model"


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
