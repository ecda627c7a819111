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
    pass_cost,
    shape_of,
    ulysses_cost,
)
from wf_backends.planner.explanation import scheme
from wf_backends.planner.head_splits import head_splits
from wf_backends.planner.plan import Choice, PassPlan, Plan, Request, fastest_of, ranked
from wf_backends.planner.proxy import representative, with_documents, with_message_counts
from wf_backends.schedule import Placed, place, placements

HEAD_SPLITS_COUNTED = 3  # message by message: the best (degree, stride) pairs by closed forms
_PLANNING = Lock()  # where ranks are threads, the first one plans and the others read its plan


def plan_for(request: Request) -> Plan:
    """The best plan for a call and all similar calls, with its cost for `representative`.

    Raises:
        ValueError: if no plan fits the memory limit or the heads.
    """
    with _PLANNING:
        return check_memory(_planned(representative(request)), request)


@lru_cache(maxsize=64)
def _planned(request: Request) -> Plan:
    """The best plan, whether or not it fits the memory; where few routes are counted, the plan for
    one document if it is better."""
    on_few_routes = with_message_counts(request)
    if on_few_routes == request:
        return _first_plan(request)
    one_document = replace(request, workload=with_documents(request.workload, None))
    choice = _first_plan(one_document).choice
    plans = [price_plan(on_few_routes, choice), _first_plan(on_few_routes)]
    return ranked(plans, on_few_routes)[0]


def all_plans(request: Request) -> list[Plan]:
    """Every head split and forward route with its best backward, the best first (see `ranked`).

    Of every head split also the fastest forward with the fastest backward. Plans over the memory
    limit come last, ordered by the memory that they need. If none is within the limit, chunks that
    only save memory are looked at too.

    Raises:
        ValueError: if no ulysses degree of the request fits the ranks and heads.
    """
    plans = _sorted_plans(request, head_splits(request))
    if plans[0].cost.memory_bytes > request.memory_limit:
        return _sorted_plans(request, head_splits(request, min_hidden_share=0.0))
    return plans


def best_plan(request: Request) -> Plan:
    """The first of `all_plans`, unless closed forms misjudge its head split.

    Where every message is counted, only the few head splits are looked at that are the best by
    closed forms. Under a window or documents, of which closed forms know little, all are.

    Raises:
        ValueError: if no plan fits the memory, naming the one that comes closest, or no ulysses
            degree of the request fits the ranks and heads.
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
    """The best pairs of degree and stride, each with its best chunks, by closed forms."""
    best_by_pair = dict[tuple[int, int], HeadSplit]()
    for plan in _sorted_plans(replace(request, exact_up_to=0), splits):
        pair = plan.choice.degree, plan.choice.stride
        best_by_pair.setdefault(pair, _split(request, plan.choice))
    return list(best_by_pair.values())[:HEAD_SPLITS_COUNTED]


def check_memory(best: Plan, request: Request) -> Plan:
    """`best` itself, the first of `all_plans`, if it fits the memory.

    Raises:
        ValueError: if it does not, and so no plan does, saying what it needs.
    """
    needs, limit = best.cost.memory_bytes / 2**30, request.memory_limit / 2**30
    if needs > limit:
        raise ValueError(
            f"no plan fits the memory limit of {limit:.3g} GiB a rank; the closest, "
            f"{scheme(best, request.topology.size)}, needs {needs:.3g} GiB. Use more ranks, a "
            "shorter sequence or a smaller batch"
        )
    return best


def price_plan(request: Request, choice: Choice) -> Plan:
    """The plan of a choice, with its cost for this request."""
    routes = {"forward": (choice.forward,), "backward": (choice.backward,)}
    only = replace(request, **routes, moves=(choice.moves,), keeps=(choice.keep,))
    (plan,) = _plans(only, _split(request, choice))
    return plan


def _split(request: Request, choice: Choice) -> HeadSplit:
    parts = choice.degree, choice.stride, choice.chunks
    return HeadSplit(request.workload, request.topology, *parts)


def _sorted_plans(request: Request, splits: Iterable[HeadSplit]) -> list[Plan]:
    return ranked([plan for split in splits for plan in _plans(request, split)], request)


def _plans(request: Request, split: HeadSplit) -> Iterator[Plan]:
    """The plans of a head split, as `all_plans` says, and those that keep what they gather."""
    around = ulysses_cost(split) + ulysses_cost(split)  # of the forward and of the backward
    within = replace(request, memory_bytes=request.memory_limit - around.memory_bytes)
    sides = request.moves if split.route_size > 1 else request.moves[:1]  # one rank moves nothing
    forward_routes = _candidates(request, split, request.forward)
    backward_routes = forward_routes
    if request.backward != request.forward:
        backward_routes = _candidates(request, split, request.backward)
    for keep in sorted(request.keeps):
        if keep:
            forward_routes = backward_routes = {
                placed: shape
                for placed, shape in forward_routes.items()
                if placed in backward_routes and (shape.gathers or False not in request.keeps)
            }
        forwards = _passes(request, split, replace(FORWARD, keep=keep), forward_routes)
        kinds = [PassKind("backward", side == "queries", keep) for side in sides]
        backwards = [p for kind in kinds for p in _passes(request, split, kind, backward_routes)]
        for forward, backward in _pairs(forwards, backwards, within, one_route=keep):
            routes, moves = (forward.placed, backward.placed), backward.moves
            choice = Choice(split.degree, *routes, moves, keep, split.stride, split.chunks)
            layers = request.layers if keep else 1
            yield Plan(choice, forward.cost, backward.cost, around, layers)


def _pairs(
    forwards: Sequence[PassPlan], backwards: Sequence[PassPlan], request: Request, one_route: bool
) -> list[tuple[PassPlan, PassPlan]]:
    """Every forward with the best backward, and the fastest forward with the fastest backward; with
    `one_route` every backward with the forward on its route."""
    if one_route:
        forward_on = {forward.placed: forward for forward in forwards}
        on_both = (backward for backward in backwards if backward.placed in forward_on)
        return [(forward_on[backward.placed], backward) for backward in on_both]
    best = ranked(backwards, request)[0]
    pairs = [(forward, best) for forward in forwards]
    fastest = fastest_of(forwards, request), fastest_of(backwards, request)
    return pairs if fastest in pairs else [*pairs, fastest]


def _candidates(
    request: Request, split: HeadSplit, named: Sequence[Placed] | None
) -> Mapping[Placed, RouteShape]:
    """The routes to look at, with their shapes.

    These are the named routes; where none are named all routes, also with rows that cross to a host
    once where several ranks of a host read a row. Closed forms see only a route's shape: they look
    at the first route of each shape.
    """
    routes = placements(split.route_size) if named is None else named
    shapes = {placed: shape_of(placed, split) for placed in routes}
    if named is not None:
        return shapes
    shapes |= {
        replace(placed, host_size=split.topology.ranks_per_host): replace(shape, cross_once=True)
        for placed, shape in shapes.items()
        if shape.crosses_several_times
    }
    if request.is_exact:
        return shapes
    first_of_shape = dict[RouteShape, Placed]()
    for placed, shape in shapes.items():
        first_of_shape.setdefault(shape, placed)
    return {placed: shape for shape, placed in first_of_shape.items()}


def _passes(
    request: Request, split: HeadSplit, kind: PassKind, candidates: Mapping[Placed, RouteShape]
) -> list[PassPlan]:
    """The plans of one pass, one on each of these routes.

    In a forward queries walk on routes whose keys stay. Routes with `cross_once` are left out where
    the side that stays gathers nothing that could cross; not in the backward of rows that are kept,
    which is on the forward's route.
    """
    keys_stay = replace(kind, queries_walk=True) if kind.name == FORWARD.name else kind
    forms = {} if request.is_exact else {k: ClosedForm(split, k) for k in {kind, keys_stay}}
    plans = list[PassPlan]()
    for placed, shape in candidates.items():
        route_kind = keys_stay if placed.keys_stay else kind
        stay, _ = route_kind.ordered(shape.queries, shape.keys)
        if shape.cross_once and not (stay.foreign or (kind.keep and kind.name != FORWARD.name)):
            continue
        if request.is_exact:
            schedule = place(placed, split.route_size)
            cost = pass_cost(split, schedule, route_kind, placed.host_size)
        else:
            cost = forms[route_kind].cost(shape)
        plans.append(PassPlan(placed, route_kind, cost))
    return plans
