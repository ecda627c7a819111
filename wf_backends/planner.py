"""Which plan is the fastest: every route, placement, direction and head split, by predicted time.

Pure: standard library only, and deterministic: the same request gives the same plan on every rank,
without a message. Up to `exact_up_to` ranks a cost is derived message by message (cost.py), beyond
that by closed forms (estimate.py).
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from wf_backends.cost import (
    FORWARD,
    Cost,
    Job,
    Walk,
    agreement_cost,
    ulysses_cost,
)
from wf_backends.placement import Placed, divisors
from wf_backends.plans import (
    BACKWARDS,
    Order,
    PassPlan,
    Plan,
    Request,
    pass_order,
    plan_order,
    rounded,
)
from wf_backends.search import Pricing, best_of, candidates_of, kept_plans, passes


def legal_degrees(request: Request) -> list[int]:
    """The ulysses degrees that the ranks and heads allow, rising."""
    shape = request.workload.shape
    return [
        degree
        for degree in divisors(request.topology.size)
        if shape.heads % degree == 0
        and (shape.kv_heads % degree == 0 or degree % shape.kv_heads == 0)
        and (request.degrees is None or degree in request.degrees)
    ]


def all_plans(request: Request) -> list[Plan]:
    """Every head split and forward route with its best backward, fastest first.

    Plans over the memory limit come last, by what they need.

    Raises:
        ValueError: if no ulysses degree that may be used fits the ranks and heads.
    """
    plans: list[Plan] = []
    for job in _jobs(request):
        both = _around(job)
        plans += kept_plans(request, job, both)
        if False not in request.keeps:
            continue
        limit = request.memory_limit - both.memory_bytes
        backward = min(passes(request, job, _backwards(request)), key=pass_order(limit))
        forward = passes(request, job, (FORWARD,))
        plans += [Plan(job.degree, one, backward, both) for one in forward]
    return sorted(plans, key=plan_order(request.memory_limit))


def best_plan(request: Request) -> Plan:
    """The first of `all_plans`; candidates that cannot win are not looked at.

    Raises:
        ValueError: if no plan fits the memory, naming the one that comes closest, or no ulysses
            degree that may be used fits the ranks and heads.
    """
    with _uncollected():
        plan = _best_of_splits(request)
    if plan.cost.memory_bytes > request.memory_limit:
        plan = all_plans(request)[0]
    return check_memory(plan, request)


@contextmanager
def _uncollected() -> Generator[None]:
    """No garbage collection: of a process with torch in it one takes longer than the planning."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _best_of_splits(request: Request) -> Plan:
    """The first of all plans, if one fits the memory, without pricing splits that cannot win."""
    order = plan_order(request.memory_limit)
    splits = [_Split(request, job) for job in _jobs(request)]
    best: tuple[Order, int, Plan] | None = None
    for at in sorted(range(len(splits)), key=lambda at: splits[at].bound):
        if best is not None and best[0][:2] < (0.0, rounded(splits[at].bound)):
            break
        for plan in splits[at].plans():
            found = (order(plan), at, plan)
            best = found if best is None or found[:2] < best[:2] else best
    assert best is not None, "every head split has a plan"
    return best[2]


class _Split:
    """One head split of a request: its candidates, and what all its plans take at least."""

    def __init__(self, request: Request, job: Job) -> None:
        self.request, self.job, self.around = request, job, _around(job)
        self.backward = candidates_of(request, job, _backwards(request))
        self.forward = candidates_of(request, job, (FORWARD,))
        self.bound = self.around.seconds + min(one.bound for one in self.forward)
        if True not in request.keeps:  # what is kept makes a backward shorter than its bound
            self.bound += min(one.bound for one in self.backward)

    def plans(self) -> Iterator[Plan]:
        """Those that keep something, and the best of the others."""
        yield from kept_plans(self.request, self.job, self.around)
        if False not in self.request.keeps:
            return
        limit, order = self.request.memory_limit, plan_order(self.request.memory_limit)
        fits = pass_order(limit - self.around.memory_bytes)
        backward = best_of(self.backward, fits, 0.0)

        def whole(forward: PassPlan) -> Plan:
            return Plan(self.job.degree, forward, backward, self.around)

        rest = self.around.seconds + backward.cost.seconds
        yield whole(best_of(self.forward, lambda one: order(whole(one)), rest))


def check_memory(first: Plan, request: Request) -> Plan:
    """The first of `all_plans` itself, once it is known to fit the memory.

    Raises:
        ValueError: if it does not, and so none does, saying what it needs.
    """
    needs, limit = first.cost.memory_bytes / 2**30, request.memory_limit / 2**30
    if needs > limit:
        raise ValueError(
            f"no plan fits the memory limit of {limit:.3g} GiB a rank; the closest, ulysses_degree "
            f"{first.degree}, forward {first.forward.placed}, backward {first.backward.placed}, "
            f"needs {needs:.3g} GiB. Use more ranks, a shorter sequence or a smaller batch"
        )
    return first


def price_plan(
    request: Request, degree: int, forward: Placed, backward: Placed, moves: str = "keys"
) -> Plan:
    """A plan of one's own choice with its cost."""
    job = Job(request.workload, request.topology, degree)
    there = Pricing(request, job, FORWARD).price(forward)
    back = Pricing(request, job, BACKWARDS[moves]).price(backward)
    return Plan(degree, there, back, _around(job))


def price_again(request: Request, plan: Plan) -> Plan:
    """A plan that was made for another request, with what it costs in this one."""
    job = Job(request.workload, request.topology, plan.degree)
    there, back = plan.forward, plan.backward
    return replace(
        plan,
        forward=Pricing(request, job, replace(FORWARD, keep=plan.keep)).price(there.placed),
        backward=Pricing(request, job, back.walk).price(back.placed),
        around=_around(job),
    )


def _jobs(request: Request) -> list[Job]:
    degrees = legal_degrees(request)
    if not degrees:
        shape = request.workload.shape
        raise ValueError(
            f"no ulysses_degree of {request.degrees or 'any size'} divides the "
            f"{request.topology.size} ranks and {shape.heads} heads, and divides the "
            f"{shape.kv_heads} key heads or is a multiple of them; 1 always does"
        )
    return [Job(request.workload, request.topology, degree) for degree in degrees]


def _backwards(request: Request) -> tuple[Walk, ...]:
    return tuple(BACKWARDS[side] for side in request.moves)


def _around(job: Job) -> Cost:
    """Agreeing once, and trading heads for tokens in both passes."""
    once = ulysses_cost(job)
    return agreement_cost(job.topology) + once + once
