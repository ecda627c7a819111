"""Which plan is the fastest: every route, placement and head split, by predicted time.

The same request gives the same plan on every rank, without a message. Up to `exact_up_to` ranks a
cost is derived message by message (cost/exact_cost.py), beyond by closed forms
(cost/closed_form.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from threading import Lock

from wf_backends.cost import (
    FORWARD,
    ClosedForm,
    HeadSplit,
    PassKind,
    RouteShape,
    around,
    pass_cost,
    shape_of,
)
from wf_backends.planner.head_splits import head_splits
from wf_backends.planner.plan import MOVES, Choice, PassPlan, Plan, Request, fastest_of, ranked
from wf_backends.planner.proxy import alike, counted, packed
from wf_backends.schedule import Placed, place, placements

HEAD_SPLITS_COUNTED = 3  # message by message, of the pairs that closed forms find the best
_PLANNING = Lock()  # ranks that are threads ask together: the first plans, the others read


def plan_for(request: Request) -> Plan:
    """The best plan for a call and for those that are like it; priced as `alike` says.

    Raises:
        ValueError: if no plan fits the memory limit or the heads.
    """
    with _PLANNING:
        return _planned(alike(request))


@lru_cache(maxsize=64)
def _planned(request: Request) -> Plan:
    """The best plan; where few routes are counted, or that for one document if it is better."""
    few = counted(request)
    if few == request:
        return best_plan(request)
    one = replace(request, workload=packed(request.workload, None))
    plans = [price_plan(few, _first_plan(one).choice), _first_plan(few)]
    return check_memory(ranked(plans, few)[0], few)


def all_plans(request: Request) -> list[Plan]:
    """Every head split and forward route with its best backward, the best first (see `ranked`).

    Of every head split also the fastest forward with the fastest backward. Plans over the memory
    limit come last, by what they need. Where none is within it, chunks that save memory alone are
    looked at too.

    Raises:
        ValueError: if no ulysses degree that may be used fits the ranks and heads.
    """
    plans = _sorted_plans(request, head_splits(request))
    if plans[0].cost.memory_bytes > request.memory_limit:
        return _sorted_plans(request, head_splits(request, min_hidden_share=0.0))
    return plans


def best_plan(request: Request) -> Plan:
    """The first of `all_plans`, unless closed forms misjudge its head split.

    Where every message is counted, it is for the few head splits that closed forms find the best;
    under a window or documents for all of them, of which closed forms know little.

    Raises:
        ValueError: if no plan fits the memory, naming the one that comes closest, or no ulysses
            degree that may be used fits the ranks and heads.
    """
    return check_memory(_first_plan(request), request)


def _first_plan(request: Request) -> Plan:
    """The best plan, whether or not it fits the memory."""
    splits = head_splits(request)
    if request.is_exact and not request.workload.mask.is_near:
        splits = _promising(request, splits)
    plan = _sorted_plans(request, splits)[0]
    return plan if plan.cost.memory_bytes <= request.memory_limit else all_plans(request)[0]


def _promising(request: Request, splits: Sequence[HeadSplit]) -> list[HeadSplit]:
    """A few pairs of degree and stride, each in the chunks that closed forms find the best."""
    found = dict[tuple[int, int], HeadSplit]()
    for plan in _sorted_plans(replace(request, exact_up_to=0), splits):
        pair = plan.choice.degree, plan.choice.stride
        found.setdefault(pair, _split(request, plan.choice))
    return list(found.values())[:HEAD_SPLITS_COUNTED]


def check_memory(first: Plan, request: Request) -> Plan:
    """The first of `all_plans` itself, once it is known to fit the memory.

    Raises:
        ValueError: if it does not, and so none does, saying what it needs.
    """
    needs, limit = first.cost.memory_bytes / 2**30, request.memory_limit / 2**30
    choice = first.choice
    if needs > limit:
        raise ValueError(
            f"no plan fits the memory limit of {limit:.3g} GiB a rank; the closest, ulysses_degree "
            f"{choice.split}, forward {choice.forward}, backward {choice.backward}, "
            f"needs {needs:.3g} GiB. Use more ranks, a shorter sequence or a smaller batch"
        )
    return first


def price_plan(request: Request, choice: Choice) -> Plan:
    """The plan of a choice, with its cost in this request."""
    routes = {"forward": (choice.forward,), "backward": (choice.backward,)}
    named = replace(request, **routes, moves=(choice.moves,), keeps=(choice.keep,))
    (plan,) = _plans(named, _split(request, choice))
    return plan


def _split(request: Request, choice: Choice) -> HeadSplit:
    parts = choice.degree, choice.stride, choice.chunks
    return HeadSplit(request.workload, request.topology, *parts)


def _sorted_plans(request: Request, splits: Iterable[HeadSplit]) -> list[Plan]:
    return ranked([plan for split in splits for plan in _plans(request, split)], request)


def _plans(request: Request, split: HeadSplit) -> Iterator[Plan]:
    """The plans of a head split, as `all_plans` says, and those that keep what they gather.

    These take one route in both passes, and find the gathered rows in memory.
    """
    outside = around(split)
    within = replace(request, memory_bytes=request.memory_limit - outside.memory_bytes)
    sides = request.moves if split.route_size > 1 else request.moves[:1]  # nothing moves on one
    named = {request.forward, request.backward}
    routes = {one: _candidates(request, split, one) for one in named}
    there, back = routes[request.forward], routes[request.backward]
    for keep in sorted(request.keeps):
        if keep:
            there = back = {
                placed: shape
                for placed, shape in there.items()
                if placed in back and (placed.gathers or False not in request.keeps)
            }
        forward = _passes(request, split, replace(FORWARD, keep=keep), there)
        kinds = [PassKind("backward", side == MOVES[1], keep) for side in sides]
        backward = [one for kind in kinds for one in _passes(request, split, kind, back)]
        for one, other in _pairs(forward, backward, within, one_route=keep):
            moves = MOVES[other.kind.queries_walk]
            choice = Choice(
                split.degree, one.placed, other.placed, moves, keep, split.stride, split.chunks
            )
            yield Plan(choice, one.cost, other.cost, outside, request.layers if keep else 1)


def _pairs(
    forward: Sequence[PassPlan], backward: Sequence[PassPlan], request: Request, one_route: bool
) -> list[tuple[PassPlan, PassPlan]]:
    """Every forward with the backwards on its own route; or with the best backward, and the fastest
    with the fastest."""
    if one_route:
        on_route = {one.placed: one for one in forward}
        return [(on_route[one.placed], one) for one in backward]
    best = ranked(backward, request)[0]
    pairs = [(one, best) for one in forward]
    fastest = fastest_of(forward, request), fastest_of(backward, request)
    return pairs if fastest in pairs else [*pairs, fastest]


def _candidates(
    request: Request, split: HeadSplit, named: Sequence[Placed] | None
) -> Mapping[Placed, RouteShape]:
    """The routes that are named; else all, and those on which hosts read rows several times also
    with rows that cross once.

    Closed forms know no more of a route than its shape: of several routes of one shape only the
    first is a candidate.
    """
    routes = placements(split.route_size) if named is None else named
    found = {placed: shape_of(placed, split) for placed in routes}
    if named is not None:
        return found
    found |= {
        replace(placed, host_size=split.topology.ranks_per_host): replace(shape, once=True)
        for placed, shape in found.items()
        if shape.crosses_several_times
    }
    if request.is_exact:
        return found
    first = dict[RouteShape, Placed]()
    for placed, shape in found.items():
        first.setdefault(shape, placed)
    return {placed: shape for shape, placed in first.items()}


def _passes(
    request: Request, split: HeadSplit, kind: PassKind, candidates: Mapping[Placed, RouteShape]
) -> list[PassPlan]:
    """One pass on each of these routes. In a forward whose keys stay, queries walk.

    Rows that cross once are of the side that stays: not on a route that gathers none of them.
    """
    turned = replace(kind, queries_walk=True) if kind.name == FORWARD.name else kind
    forms = {} if request.is_exact else {walk: ClosedForm(split, walk) for walk in {kind, turned}}
    found = list[PassPlan]()
    for placed, shape in candidates.items():
        walk = turned if placed.keys_stay else kind
        stay, _ = walk.ordered(shape.queries, shape.keys)
        if shape.once and not stay.foreign:
            continue
        if request.is_exact:
            cost = pass_cost(split, place(placed, split.route_size), walk, placed.host_size)
        else:
            cost = forms[walk].cost(shape)
        found.append(PassPlan(placed, walk, cost))
    return found
