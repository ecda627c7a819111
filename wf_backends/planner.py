"""Which plan is the fastest: every route, placement, direction and head split, by predicted time.

Pure: standard library only, and deterministic: the same request gives the same plan on every rank,
without a message. Up to `exact_up_to` ranks a cost is derived message by message (cost.py), beyond
that by closed forms (estimate.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from wf_backends.config import AUTO, MOVES, Route, SequenceParallelConfig
from wf_backends.cost import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD,
    Cost,
    Job,
    Walk,
    Workload,
    pass_cost,
    ulysses_cost,
)
from wf_backends.estimate import Estimator, ends_early
from wf_backends.mask import FULL, Mask
from wf_backends.placement import Placed, digits, divisors, place, placements
from wf_backends.schedule import Schedule
from wf_backends.topology import PRESETS, Topology
from wf_backends.traffic import Shape

BACKWARDS = {"keys": BACKWARD_KEYS, "queries": BACKWARD_QUERIES}
ROUNDING = 1e-8  # more than times lose when they are rounded to be compared


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is wanted for."""

    topology: Topology
    workload: Workload
    memory_bytes: float | None = None
    """What attention may take of a rank's memory beyond its inputs; None = the topology's."""
    degrees: tuple[int, ...] | None = None
    """The ulysses degrees to look at; None = all that the ranks and heads allow."""
    forward: tuple[Placed, ...] | None = None
    """The forward routes to look at; None = all. They fit every degree looked at."""
    backward: tuple[Placed, ...] | None = None
    moves: tuple[str, ...] = MOVES
    """Which sides may walk in the backward."""
    exact_up_to: int = 8
    """Ranks up to which every message is counted."""

    @property
    def memory_limit(self) -> float:
        return self.topology.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass: its route, who plays which part, which side walks, and what it costs."""

    placed: Placed
    walk: Walk
    cost: Cost

    def schedule(self, size: int) -> Schedule:
        """The schedule for `size` ranks of the route."""
        return place(self.placed, size)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole way to run attention, forward and backward."""

    degree: int
    forward: PassPlan
    backward: PassPlan
    ulysses: Cost
    """Trading heads for tokens, both passes."""

    @property
    def cost(self) -> Cost:
        """Both passes and what is around them."""
        total = self.ulysses + self.forward.cost + self.backward.cost
        memory = self.ulysses.memory_bytes
        memory += max(self.forward.cost.memory_bytes, self.backward.cost.memory_bytes)
        return replace(total, memory_bytes=memory)

    @property
    def moves(self) -> str:
        """Which side walks in the backward, as in the config."""
        return "queries" if self.backward.walk.queries_walk else "keys"

    @property
    def in_rank_order(self) -> bool:
        """Whether a config can say it: every part is played by the rank of its number."""
        return self.forward.placed.in_rank_order and self.backward.placed.in_rank_order

    def to_config(self, size: int, layout: str) -> dict[str, Any]:
        """The words of a config for this plan; the placement is not among them."""
        return {
            "sequence_parallel_size": size,
            "route": self.forward.placed.route,
            "backward_route": self.backward.placed.route,
            "backward_moves": self.moves,
            "ulysses_degree": self.degree,
            "layout": layout,
        }


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
        around = ulysses_cost(job)
        both = around + around
        backward = _passes(request, job, _backwards(request))
        limit = request.memory_limit - both.memory_bytes
        best = min(backward, key=lambda p: _order(p.cost, limit))
        forward = _passes(request, job, (FORWARD,))
        plans += [Plan(job.degree, one, best, both) for one in forward]
    return sorted(plans, key=lambda plan: _order(plan.cost, request.memory_limit))


def best_plan(request: Request) -> Plan:
    """The fastest plan that fits the memory; candidates that cannot win are not looked at.

    Raises:
        ValueError: if no plan fits the memory, naming the one that comes closest, or no ulysses
            degree that may be used fits the ranks and heads.
    """
    best: Plan | None = None
    for job in _jobs(request):
        around = ulysses_cost(job)
        both = around + around
        limit = request.memory_limit - both.memory_bytes
        forward = _best_pass(request, job, (FORWARD,), limit)
        backward = _best_pass(request, job, _backwards(request), limit)
        if forward and backward:
            plan = Plan(job.degree, forward, backward, both)
            best = min(best or plan, plan, key=lambda p: _order(p.cost, request.memory_limit))
    if best is None:
        raise ValueError(_closest(request))
    return best


def plan_call(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
) -> Plan:
    """The plan of an attention call, for what a config leaves to "auto".

    The head split, the layout and the side that walks in the backward are the config's. Where
    route is "auto" and backward_route is not named, both are chosen apart. Documents are left out
    of the prediction, so that the choice is the same for every batch.

    Args:
        shape: batch, heads and kv_heads before the Ulysses exchange.
        topology: of the sequence-parallel ranks, or of more of the same hosts; None = one host.

    Raises:
        ValueError: if no plan fits the topology's memory or the heads.
    """
    band = Mask(mask.band)
    return _plan_call(config, shape, seqlen, band, topology or _one_host(config))


@lru_cache(maxsize=64)
def _plan_call(
    config: SequenceParallelConfig, shape: Shape, seqlen: int, mask: Mask, topology: Topology
) -> Plan:
    forward = _named(config.route, config.route_size)
    named = config.route if config.backward_route is None else config.backward_route
    request = Request(
        topology.with_ranks(config.sequence_parallel_size),
        Workload(shape, seqlen, mask, config.layout),
        degrees=(config.ulysses_degree,),
        forward=forward,
        backward=_named(named, config.route_size),
        moves=(config.backward_moves,),
    )
    return best_plan(request)


def _one_host(config: SequenceParallelConfig) -> Topology:
    size = config.sequence_parallel_size
    return replace(PRESETS["one-host"], ranks_per_host=size)


def _named(route: Route, size: int) -> tuple[Placed, ...] | None:
    """The one route that a config names, in rank order; None for "auto"."""
    if route == AUTO or route is None or isinstance(route, str):
        return None
    return (in_rank_order(dict(route), size),)


def in_rank_order(route: dict[str, Any], size: int) -> Placed:
    """A route as a config names it: part r is played by rank r."""
    order = tuple(range(len(digits(route, size))))
    return Placed(tuple(sorted(route.items())), order)


def price_plan(
    request: Request, degree: int, forward: Placed, backward: Placed, moves: str = "keys"
) -> Plan:
    """A plan of one's own choice with its cost."""
    job = Job(request.workload, request.topology, degree)
    around = ulysses_cost(job)
    there = _Pricing(request, job, FORWARD).price(forward)
    back = _Pricing(request, job, BACKWARDS[moves]).price(backward)
    return Plan(degree, there, back, around + around)


class _Pricing:
    """The candidates of one pass of a job, and what they cost."""

    def __init__(self, request: Request, job: Job, walk: Walk) -> None:
        self.job, self.walk = job, walk
        self.exact = request.topology.size <= request.exact_up_to
        self.estimator = Estimator(job, walk)
        named = request.forward if walk is FORWARD else request.backward
        self.candidates = self._all() if named is None else list(named)

    def _all(self) -> list[Placed]:
        masked = self.job.workload.mask.band != FULL
        directed = masked if self.exact else ends_early(self.job)
        return placements(self.job.route_size, directed)

    def price(self, placed: Placed) -> PassPlan:
        if self.exact:
            schedule = place(placed, self.job.route_size)
            return PassPlan(placed, self.walk, pass_cost(self.job, schedule, self.walk))
        return PassPlan(placed, self.walk, self.estimator.cost(placed))


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


def _passes(request: Request, job: Job, walks: Sequence[Walk]) -> Iterator[PassPlan]:
    for pricing in (_Pricing(request, job, walk) for walk in walks):
        yield from map(pricing.price, pricing.candidates)


def _best_pass(request: Request, job: Job, walks: Sequence[Walk], limit: float) -> PassPlan | None:
    """The fastest pass within the memory limit; None if there is none."""
    candidates = [
        (pricing.estimator.bound(placed), pricing, placed)
        for pricing in (_Pricing(request, job, walk) for walk in walks)
        for placed in pricing.candidates
    ]
    best: tuple[tuple[float, ...], int, PassPlan] | None = None
    for at in sorted(range(len(candidates)), key=lambda at: candidates[at][0]):
        bound, pricing, placed = candidates[at]
        if best is not None and bound > best[0][1] * (1 + ROUNDING):
            break
        found = pricing.price(placed)
        rank = (_order(found.cost, limit), at, found)
        if not rank[0][0] and (best is None or rank[:2] < best[:2]):
            best = rank
    return best[2] if best else None


def _order(cost: Cost, limit: float) -> tuple[float, ...]:
    """Sorts costs: within the limit by time, then bytes; beyond it by memory.

    Times are rounded to nine digits, so that equals stay equal however their sums were formed.
    """
    over = cost.memory_bytes if cost.memory_bytes > limit else 0.0
    return over, float(f"{cost.seconds:.9g}"), cost.nic_bytes, cost.inside_bytes


def _closest(request: Request) -> str:
    plan = all_plans(request)[0]
    needs, limit = (x / 2**30 for x in (plan.cost.memory_bytes, request.memory_limit))
    return (
        f"no plan fits the memory limit of {limit:.3g} GiB a rank; the closest, ulysses_degree "
        f"{plan.degree}, forward {plan.forward.placed}, backward {plan.backward.placed}, needs "
        f"{needs:.3g} GiB. Use more ranks, a shorter sequence or a smaller batch"
    )


def units_sent(rows: int, cols: int, kv: float, gamma: float = 1.0) -> float:
    """Units (bytes of one rank's Q) that a rank sends, forward and backward, for a full mask.

        forward (a - 1)(1 + gamma) + 2 kv (b - 1)
        backward (a - 1)(2 + gamma) + 2 kv (b - 1)(1 + gamma)

    Args:
        rows, cols: a query shards and b key shards meet on a rank.
        kv: key heads / query heads.
        gamma: bytes of a partial result on the wire / bytes of an activation.

    Source: DeepSpeed-Ulysses, StarTrail and Mesh-Attention count the same way.
    """
    forward = (rows - 1) * (1 + gamma) + 2 * kv * (cols - 1)
    backward = (rows - 1) * (2 + gamma) + 2 * kv * (cols - 1) * (1 + gamma)
    return forward + backward


def cheapest_route(size: int, kv: float, gamma: float = 1.0) -> dict[str, Any]:
    """The route for `size` ranks that sends the fewest bytes; the ring where it is as cheap."""
    shapes = [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    rows, cols = min(shapes, key=lambda shape: units_sent(*shape, kv, gamma))
    return {"name": "ring"} if rows == 1 else {"name": "mesh", "rows": rows, "cols": cols}
