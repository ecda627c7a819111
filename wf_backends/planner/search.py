"""Which plan is the fastest: every route, placement, direction and head split, by predicted time.

Pure: standard library only, and deterministic: the same request gives the same plan on every rank,
without a message. Up to `exact_up_to` ranks a cost is derived message by message
(planner/exact_cost.py), beyond that by closed forms (planner/closed_form.py).
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from wf_backends.planner.candidates import (
    Pricing,
    best_of,
    candidates_of,
    kept_plans,
    passes,
    whole,
)
from wf_backends.planner.closed_form import ROUNDING
from wf_backends.planner.exact_cost import FORWARD, Cost, Job, Walk, agreement_cost
from wf_backends.planner.plan import (
    BACKWARDS,
    Order,
    PassPlan,
    Plan,
    Request,
    pass_order,
    plan_order,
    rounded,
)
from wf_backends.planner.splits import legal_chunks, legal_degrees, legal_strides
from wf_backends.planner.ulysses_cost import ulysses_cost
from wf_backends.schedule import Placed

WORTH = 0.02  # of what is computed: chunks that may hide less of the exchanges are not looked at


def all_plans(request: Request) -> list[Plan]:
    """Every head split and forward route with its best backward, fastest first.

    Plans over the memory limit come last, by what they need. Where none is within it, chunks that
    save memory alone are looked at too.

    Raises:
        ValueError: if no ulysses degree that may be used fits the ranks and heads.
    """
    found = _plans_of(request, _jobs(request))
    if found[0].cost.memory_bytes > request.memory_limit:
        return _plans_of(request, _jobs(request, worth=0.0))
    return found


def _plans_of(request: Request, jobs: Sequence[Job]) -> list[Plan]:
    plans: list[Plan] = []
    for job in jobs:
        both = _around(job)
        plans += kept_plans(request, job, both)
        if False not in request.keeps:
            continue
        limit = request.memory_limit - both.memory_bytes
        backward = min(passes(request, job, _backwards(request)), key=pass_order(limit))
        forward = passes(request, job, (FORWARD,))
        plans += [whole(job, one, backward, both) for one in forward]
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
    """The first of all plans, if one fits the memory, without pricing splits that cannot win.

    Neighbours with all heads first: of the others most splits then need not be looked at.
    """
    order, jobs = plan_order(request.memory_limit), _jobs(request)
    best: tuple[Order, int, Plan] | None = None
    floors: dict[tuple[int, int], float] = {}
    for oddity in sorted(set(map(_oddity, jobs))):
        some = [(at, job) for at, job in enumerate(jobs) if _oddity(job) == oddity]
        splits = [
            (at, _Split(request, job))
            for at, job in some
            if best is None or best[0][:3] >= _place(job, _least_s(job, floors))
        ]
        floors |= {(s.job.degree, s.job.stride): s.passes_s for _, s in splits}
        for at, split in sorted(splits, key=lambda item: item[1].least):
            if best is not None and best[0][:3] < split.least:
                break
            for plan in split.plans():
                found = (order(plan), at, plan)
                best = found if best is None or found[:2] < best[:2] else best
    assert best is not None, "every head split has a plan"
    return best[2]


def _least_s(job: Job, floors: Mapping[tuple[int, int], float]) -> float:
    """Seconds that any plan of a split takes at least: it computes, and trades heads.

    Args:
        floors: what passes take at least by (degree, stride). In chunks they take no less.
    """
    floor = floors.get((job.degree, job.stride), 0.0)
    return _around(job).seconds + max(_even_s(job), floor)


def _even_s(job: Job) -> float:
    """Seconds that both passes compute, at least."""
    rates = (walk.seconds_per_score(job) for walk in (FORWARD, BACKWARDS["keys"]))
    return job.workload.scores / job.route_size * job.chunks * sum(rates)


def _place(job: Job, seconds: float) -> Order:
    """The first place in the order of plans that one of a split may have, if it takes so long."""
    return 0.0, rounded(seconds * ROUNDING), float(_oddity(job) > 0)


def _oddity(job: Job) -> int:
    """0 where neighbours trade all their heads at once; what is odder is looked at later."""
    return (job.stride > 1) + 2 * (job.chunks > 1)


class _Split:
    """One head split of a request: its candidates, and what all its plans take at least."""

    def __init__(self, request: Request, job: Job) -> None:
        self.request, self.job, self.around = request, job, _around(job)
        self.backward = candidates_of(request, job, _backwards(request))
        self.forward = candidates_of(request, job, (FORWARD,))
        self.passes_s = min(one.bound for one in self.forward)
        if True not in request.keeps:  # what is kept makes a backward shorter than its bound
            self.passes_s += min(one.bound for one in self.backward)
        self.least = _place(job, self.around.seconds + self.passes_s)

    def plans(self) -> Iterator[Plan]:
        """Those that keep something, and the best of the others."""
        yield from kept_plans(self.request, self.job, self.around)
        if False not in self.request.keeps:
            return
        limit, order = self.request.memory_limit, plan_order(self.request.memory_limit)
        fits = pass_order(limit - self.around.memory_bytes)
        backward = best_of(self.backward, fits, 0.0)

        def plan(forward: PassPlan) -> Plan:
            return whole(self.job, forward, backward, self.around)

        rest = self.around.seconds + backward.cost.seconds
        yield plan(best_of(self.forward, lambda one: order(plan(one)), rest))


def check_memory(first: Plan, request: Request) -> Plan:
    """The first of `all_plans` itself, once it is known to fit the memory.

    Raises:
        ValueError: if it does not, and so none does, saying what it needs.
    """
    needs, limit = first.cost.memory_bytes / 2**30, request.memory_limit / 2**30
    if needs > limit:
        raise ValueError(
            f"no plan fits the memory limit of {limit:.3g} GiB a rank; the closest, ulysses_degree "
            f"{first.split}, forward {first.forward.placed}, backward {first.backward.placed}, "
            f"needs {needs:.3g} GiB. Use more ranks, a shorter sequence or a smaller batch"
        )
    return first


def price_plan(
    request: Request,
    degree: int,
    forward: Placed,
    backward: Placed,
    moves: str = "keys",
    stride: int = 1,
    chunks: int = 1,
) -> Plan:
    """A plan of one's own choice with its cost."""
    job = Job(request.workload, request.topology, degree, stride, chunks)
    there = Pricing(request, job, FORWARD).price(forward)
    back = Pricing(request, job, BACKWARDS[moves]).price(backward)
    return whole(job, there, back, _around(job))


def price_again(request: Request, plan: Plan) -> Plan:
    """A plan that was made for another request, with what it costs in this one."""
    job = Job(request.workload, request.topology, plan.degree, plan.stride, plan.chunks)
    there, back = plan.forward, plan.backward
    return replace(
        plan,
        forward=Pricing(request, job, replace(FORWARD, keep=plan.keep)).price(there.placed),
        backward=Pricing(request, job, back.walk).price(back.placed),
        around=_around(job),
    )


def _jobs(request: Request, worth: float = WORTH) -> list[Job]:
    """The head splits to look at.

    Args:
        worth: of what is computed, how much chunks must be able to hide.
    """
    degrees = legal_degrees(request)
    if not degrees:
        shape = request.workload.shape
        raise ValueError(
            f"no ulysses_degree of {request.degrees or 'any size'} divides the "
            f"{request.topology.size} ranks and {shape.heads} heads, and divides the "
            f"{shape.kv_heads} key heads or is a multiple of them; 1 always does"
        )
    jobs = [
        Job(request.workload, request.topology, degree, stride, chunks)
        for degree in degrees
        for stride in legal_strides(request, degree)
        for chunks in legal_chunks(request, degree)
    ]
    if request.chunks is None:
        jobs = [job for job in jobs if job.chunks == 1 or _hidden_s(job) > worth * _even_s(job)]
    if not jobs:
        shape = request.workload.shape
        raise ValueError(
            f"ulysses_chunks {request.chunks} divides neither the query nor the key heads of a "
            f"rank with any ulysses_degree of {degrees} ({shape.heads} heads, {shape.kv_heads} key "
            'heads): leave it out, or "auto"'
        )
    return jobs


def _hidden_s(job: Job) -> float:
    """Seconds of the exchanges that trading in chunks may hide, at most."""
    return _around(replace(job, chunks=1)).seconds - _around(job).seconds


def _backwards(request: Request) -> tuple[Walk, ...]:
    return tuple(BACKWARDS[side] for side in request.moves)


def _around(job: Job) -> Cost:
    """Agreeing once, and trading heads for tokens in both passes."""
    once = ulysses_cost(job)
    return agreement_cost(job.topology) + once + once
