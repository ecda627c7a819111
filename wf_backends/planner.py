"""Which plan is the fastest: every route, placement, direction and head split, by predicted time.

Pure: standard library only, and deterministic: the same request gives the same plan on every rank,
without a message. Up to `exact_up_to` ranks a cost is derived message by message (cost.py), beyond
that by closed forms (estimate.py).
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock

from wf_backends.config import AUTO, MOVES, Route, SequenceParallelConfig
from wf_backends.cost import (
    FORWARD,
    Cost,
    Job,
    Walk,
    Workload,
    agreement_cost,
    ulysses_cost,
)
from wf_backends.layout import LAYOUTS
from wf_backends.mask import Mask
from wf_backends.placement import Placed, divisors, read_placed
from wf_backends.plans import (
    BACKWARDS,
    EXACT_UP_TO,
    Choice,
    Order,
    PassPlan,
    Plan,
    Request,
    pass_order,
    plan_order,
    rounded,
)
from wf_backends.presets import one_host
from wf_backends.search import Pricing, best_of, candidates_of, kept_plans, passes
from wf_backends.topology import Topology
from wf_backends.traffic import Shape
from wf_backends.typical import typical_documents

_PLANNING = Lock()  # ranks that are threads ask together: the first plans, the others read


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


def choose(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
) -> Choice:
    """What an attention call runs: what the config names, and `plan_call` for what is "auto"."""
    if config.leaves_open:
        return plan_call(config, shape, seqlen, mask, topology, keys).choice
    named = (_named(route, config) or () for route in _both_routes(config))
    forward, backward = (placed for one in named for placed in one)
    moves, keep = str(config.backward_moves), config.keep_gathered is True
    return Choice(config.degrees[0], forward, backward, moves, keep)


def plan_call(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
) -> Plan:
    """The plan of an attention call, for what a config leaves to "auto".

    The layout is the config's. Where route is "auto" and backward_route is not named, both are
    chosen apart. So that batches that are alike share a plan, the sequence is taken to be up to an
    eighth longer than it is (see `_similar`), and its documents to be drawn ones of their kind
    (typical.py). Where messages are not counted one by one, documents are left out.

    Args:
        shape: batch, heads and kv_heads before the Ulysses exchange.
        topology: of the sequence-parallel ranks, or of more of the same hosts; None = one host,
            of whose memory nothing is known.
        keys: of cross attention, the keys' sequence length; None = seqlen.

    Raises:
        ValueError: if no plan fits the topology's memory or the heads.
    """
    keys = None if keys in (None, seqlen) else _similar(keys)
    seqlen = _similar(seqlen)
    with _PLANNING:
        return _plan_call(config, shape, seqlen, _alike(config, mask, seqlen), topology, keys)


@lru_cache(maxsize=64)
def _plan_call(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None,
    keys: int | None,
) -> Plan:
    size, moves = config.sequence_parallel_size, config.backward_moves
    cut = mask.cu_seqlens is None and LAYOUTS[config.layout].needs_documents
    layout = "zigzag" if cut else config.layout  # as even as one that follows from documents
    forward, backward = (_named(route, config) for route in _both_routes(config))
    request = Request(
        (topology or one_host(size)).with_ranks(size),
        Workload(shape, seqlen, mask, layout, keys=keys),
        degrees=config.degrees,
        forward=forward,
        backward=backward,
        moves=MOVES if moves == AUTO else (str(moves),),
        keeps=(False, True) if config.keep_gathered == AUTO else (config.keep_gathered is True,),
        layers=config.kept_layers,
    )
    return best_plan(request)


def _alike(config: SequenceParallelConfig, mask: Mask, seqlen: int) -> Mask:
    """What stands for the mask and for all that are like it."""
    size, borders = config.sequence_parallel_size, mask.cu_seqlens
    if borders is None or size > EXACT_UP_TO:
        return Mask(mask.band)
    return Mask(mask.band, typical_documents(borders, seqlen, size))


def _similar(seqlen: int) -> int:
    """The next of 8 lengths an octave: lengths that differ little are planned as one."""
    step = 1 << max(0, seqlen.bit_length() - 4)
    return -(-seqlen // step) * step


def _both_routes(config: SequenceParallelConfig) -> tuple[Route, Route]:
    back = config.route if config.backward_route is None else config.backward_route
    return config.route, back


def _named(route: Route, config: SequenceParallelConfig) -> tuple[Placed, ...] | None:
    """The one route that a config names, as it places it; None for "auto"."""
    if route == AUTO or route is None or isinstance(route, str):
        return None
    return (read_placed(route, config.sequence_parallel_size // config.degrees[0]),)


def price_plan(
    request: Request, degree: int, forward: Placed, backward: Placed, moves: str = "keys"
) -> Plan:
    """A plan of one's own choice with its cost."""
    job = Job(request.workload, request.topology, degree)
    there = Pricing(request, job, FORWARD).price(forward)
    back = Pricing(request, job, BACKWARDS[moves]).price(backward)
    return Plan(degree, there, back, _around(job))


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
