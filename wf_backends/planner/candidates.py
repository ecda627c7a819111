"""The candidates of one pass: all of them, or only those that can win.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from wf_backends.planner.closed_form import Estimator
from wf_backends.planner.exact_cost import FORWARD, Job, Walk, pass_cost
from wf_backends.planner.overlap_model import Cost
from wf_backends.planner.plan import BACKWARDS, Order, PassPlan, Plan, Request, rounded
from wf_backends.planner.ulysses_cost import pipelined
from wf_backends.schedule import FULL, Placed, place, placements


class Pricing:
    """The candidates of one pass of a job, and what they cost."""

    def __init__(self, request: Request, job: Job, walk: Walk) -> None:
        self.job, self.walk = job, walk
        self.exact = request.topology.size <= request.exact_up_to
        there = walk.name == FORWARD.name
        walks = (walk, replace(walk, queries_walk=there or walk.queries_walk))
        self.estimators = tuple(Estimator(job, one) for one in walks)
        named = request.forward if there else request.backward
        self.candidates = self._all() if named is None else named

    def _all(self) -> tuple[Placed, ...]:
        band = self.job.workload.mask.band
        directed = self.exact and band != FULL and band.left == inf  # windows turn by themselves
        return placements(self.job.route_size, directed, self.job.topology.direct_links)

    def price(self, placed: Placed) -> PassPlan:
        estimator = self._estimator(placed)
        if self.exact:
            schedule = place(placed, self.job.route_size)
            cost = pass_cost(self.job, schedule, estimator.walk, placed.two_way)
        else:
            cost = estimator.cost(placed)
        return PassPlan(placed, estimator.walk, pipelined(self.job, cost))

    def bound(self, placed: Placed) -> float:
        """Seconds that `price` finds at least."""
        estimator = self._estimator(placed)
        least = estimator.bound(placed) if self.exact else estimator.least(placed)
        return self.job.chunks * least

    def _estimator(self, placed: Placed) -> Estimator:
        """That of the side which walks on this route."""
        return self.estimators[placed.keys_stay]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pass that is not priced yet, and the seconds that it takes at least."""

    pricing: Pricing
    placed: Placed
    bound: float

    def price(self) -> PassPlan:
        return self.pricing.price(self.placed)


def candidates_of(request: Request, job: Job, walks: Sequence[Walk]) -> list[Candidate]:
    pricings = [Pricing(request, job, walk) for walk in walks]
    return [
        Candidate(pricing, one, pricing.bound(one))
        for pricing in pricings
        for one in pricing.candidates
    ]


def passes(request: Request, job: Job, walks: Sequence[Walk]) -> Iterator[PassPlan]:
    return (candidate.price() for candidate in candidates_of(request, job, walks))


def kept_plans(request: Request, job: Job, around: Cost) -> Iterator[Plan]:
    """The plans whose backward takes the forward's route and finds its gathered rows in memory.

    Args:
        around: what trading heads for tokens costs.
    """
    if True not in request.keeps:
        return
    forward = Pricing(request, job, replace(FORWARD, keep=True))
    prices = (forward.price(placed) for placed in forward.candidates)
    there = {
        one.placed: one for one in prices if one.cost.gathered_bytes or False not in request.keeps
    }
    for side in request.moves:
        backward = Pricing(request, job, replace(BACKWARDS[side], keep=True))
        for placed in backward.candidates:
            if placed in there:
                back = backward.price(placed)
                passes = there[placed], back
                yield whole(job, *passes, around, request.layers)


def whole(job: Job, forward: PassPlan, backward: PassPlan, around: Cost, layers: int = 1) -> Plan:
    """A job's plan of two passes."""
    return Plan(job.degree, forward, backward, around, layers, job.stride, job.chunks)


def best_of(
    candidates: Sequence[Candidate], order: Callable[[PassPlan], Order], rest: float
) -> PassPlan:
    """The first by `order`, then by place; those that cannot win are not priced.

    Args:
        rest: seconds that `order` counts beside the pass itself.
    """
    least = [
        (0.0, rounded(one.bound + rest), float(not one.placed.in_rank_order)) for one in candidates
    ]
    best: tuple[Order, int, PassPlan] | None = None
    for at in sorted(range(len(candidates)), key=least.__getitem__):
        if best is not None and best[0][:3] < least[at]:
            break
        one = candidates[at].price()
        found = (order(one), at, one)
        best = found if best is None or found[:2] < best[:2] else best
    assert best is not None, "there is always a ring"
    return best[2]
