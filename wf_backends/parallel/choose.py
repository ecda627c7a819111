"""What an attention call runs: what its config names, and the planner's choice for the rest.

Pure: standard library only. Calls that are alike share a plan, which a rank chooses once: lengths
count to the next of eight an octave, and packed documents by their kind (planner/typical.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from threading import Lock

from wf_backends._validation import AUTO
from wf_backends.cluster import Topology, one_host
from wf_backends.lowering import Shape
from wf_backends.parallel.config import Route, SequenceParallelConfig
from wf_backends.planner import (
    MOVES,
    NEAR_UP_TO,
    Choice,
    Plan,
    Request,
    Workload,
    best_plan,
    of_its_kind,
    on_few,
    on_fewer_ranks,
    packed,
    price_again,
    ranked,
)
from wf_backends.schedule import Mask, Placed, read_placed

_PLANNING = Lock()  # ranks that are threads ask together: the first plans, the others read


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
    apart = int(config.ulysses_stride or 1), int(config.ulysses_chunks or 1)
    return Choice(config.degrees[0], forward, backward, moves, keep, *apart)


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
    chosen apart.

    Args:
        shape: batch, heads and kv_heads before the Ulysses exchange.
        topology: of the sequence-parallel ranks, or of more of the same hosts; None = one host,
            of whose memory nothing is known.
        keys: of cross attention, the keys' sequence length; None = seqlen.

    Raises:
        ValueError: if no plan fits the topology's memory or the heads.
    """
    keys = None if keys in (None, seqlen) else _similar(keys)
    request = _request(config, shape, seqlen, mask, topology, keys)
    alike = on_fewer_ranks(request) or of_its_kind(request)
    with _PLANNING:
        return _plan(alike)


@lru_cache(maxsize=64)
def _plan(request: Request) -> Plan:
    mask, size = request.workload.mask, request.topology.size
    if not mask.is_near or size <= request.exact_up_to or size > NEAR_UP_TO:
        return best_plan(request)
    one, few = replace(request, workload=packed(request.workload, None)), on_few(request)
    plans = [*(price_again(few, plan) for plan in _fitting(one)), *_fitting(few)]
    best = ranked(plans, few.topology, few.memory_limit)
    return best[0] if best else best_plan(few)


def _fitting(request: Request) -> list[Plan]:
    """The best plan, if one fits the memory: one document may need more of it than several."""
    try:
        return [best_plan(request)]
    except ValueError:
        return []


def _request(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None,
    keys: int | None,
) -> Request:
    """What the planner is asked."""
    size, moves = config.sequence_parallel_size, config.backward_moves
    work = Workload(shape, _similar(seqlen), mask.within(seqlen), config.layout, keys=keys)
    forward, backward = (_named(route, config) for route in _both_routes(config))
    return Request(
        (topology or one_host(size)).with_ranks(size),
        packed(work, mask.cu_seqlens),
        degrees=config.degrees,
        strides=_numbers(config.ulysses_stride),
        chunks=_numbers(config.ulysses_chunks),
        forward=forward,
        backward=backward,
        moves=MOVES if moves == AUTO else (str(moves),),
        keeps=(False, True) if config.keep_gathered == AUTO else (config.keep_gathered is True,),
        layers=config.kept_layers,
    )


def _numbers(value: int | str | None) -> tuple[int, ...] | None:
    """The one number that a config names; None for "auto"."""
    return None if value == AUTO else (int(value or 1),)


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
