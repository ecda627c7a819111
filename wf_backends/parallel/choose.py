"""What an attention call runs: what its config names, and the planner's choice for the rest.

Pure: standard library only. Similar calls share a plan, which a rank chooses once: lengths are
rounded up to one of eight an octave, documents replaced by typical ones (`representative`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wf_backends._validation import AUTO
from wf_backends.cluster import Topology, one_host
from wf_backends.config import LSS, Route, SequenceParallelConfig
from wf_backends.lowering import Shape
from wf_backends.planner import MOVES, Choice, Plan, Request, Workload, plan_for
from wf_backends.schedule import Mask, Placed, read_placed


def choose(
    config: SequenceParallelConfig, request: Request, tell: Callable[[Plan, Request], None]
) -> Choice:
    """What an attention call runs.

    Args:
        request: `request_of` the config.
        tell: called with what was planned and for what, where anything is "auto".

    Raises:
        ValueError: if no plan fits the topology's memory or the heads.
    """
    if config.leaves_open:
        plan = plan_for(request)
        tell(plan, request)
        return plan.choice
    routes = request.degrees, request.forward, request.backward
    named: Any = (*routes, request.moves, request.keeps, request.strides, request.chunks)
    return Choice(*(only for (only,) in named))


def request_of(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
) -> Request:
    """What the planner is asked of an attention call, for what a config leaves to "auto".

    The layout is the config's. Where route is "auto" and backward_route is not named, both are
    chosen apart.

    Args:
        shape: batch, heads and kv_heads before the Ulysses exchange.
        topology: of the sequence-parallel ranks, or of more of the same hosts; None = one host,
            of whose memory nothing is known.
        keys: of cross attention, the keys' sequence length; None = seqlen.
    """
    size, moves, keep = config.sequence_parallel_size, config.backward_moves, config.keep_gathered
    topology = (topology or one_host(size)).with_ranks(size)
    kernel = config.kernel if config.kernel in dict(topology.kernels) else AUTO
    back = config.route if config.backward_route is None else config.backward_route
    return Request(
        topology,
        Workload(shape, seqlen, mask.within(seqlen), config.layout, kernel, keys),
        degrees=config.degrees,
        strides=_numbers(config.ulysses_stride),
        chunks=_numbers(config.ulysses_chunks),
        forward=_named(config.route, config),
        backward=_named(back, config),
        moves=MOVES if moves == AUTO else (str(moves),),
        keeps=(False, True) if keep == AUTO else (keep is True or config.strategy == LSS,),
        layers=config.kept_layers,
    )


def _numbers(value: int | str | None) -> tuple[int, ...] | None:
    """The one number that a config names; None for "auto"."""
    return None if value == AUTO else (int(value or 1),)


def _named(route: Route, config: SequenceParallelConfig) -> tuple[Placed, ...] | None:
    """The one route that a config names, as it places it; None for "auto"."""
    if route is None or isinstance(route, str):
        return None
    return (read_placed(route, config.sequence_parallel_size // config.degrees[0]),)
