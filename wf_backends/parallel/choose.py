"""What an attention call runs: what its config names, and the planner's choice for the rest.

Pure: standard library only. Calls that are alike share a plan, which a rank chooses once: lengths
count to the next of eight an octave, and packed documents by their kind (`planner.alike`).
"""

from __future__ import annotations

from collections.abc import Callable

from wf_backends._validation import AUTO
from wf_backends.cluster import Topology, one_host
from wf_backends.lowering import Shape
from wf_backends.parallel.config import LSS, Route, SequenceParallelConfig
from wf_backends.planner import MOVES, Choice, Plan, Request, Workload, plan_for
from wf_backends.schedule import Mask, Placed, read_placed


def choose(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
    tell: Callable[[Plan, Request], None] | None = None,
) -> Choice:
    """What an attention call runs: what the config names, and `plan_call` for what is "auto".

    Args:
        tell: called with what was planned and for what, where anything is "auto".
    """
    if config.leaves_open:
        request = request_of(config, shape, seqlen, mask, topology, keys)
        plan = plan_for(request)
        if tell is not None:
            tell(plan, request)
        return plan.choice
    named = (_named(route, config) or () for route in _both_routes(config))
    forward, backward = (placed for one in named for placed in one)
    moves, keep = str(config.backward_moves), config.keep_gathered is True or config.strategy == LSS
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
    return plan_for(request_of(config, shape, seqlen, mask, topology, keys))


def request_of(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
) -> Request:
    """What the planner is asked; see `plan_call`."""
    size, moves = config.sequence_parallel_size, config.backward_moves
    topology = (topology or one_host(size)).with_ranks(size)
    kernel = config.kernel if config.kernel in dict(topology.kernels) else AUTO
    work = Workload(shape, seqlen, mask.within(seqlen), config.layout, kernel, keys)
    forward, backward = (_named(route, config) for route in _both_routes(config))
    return Request(
        topology,
        work,
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


def _both_routes(config: SequenceParallelConfig) -> tuple[Route, Route]:
    back = config.route if config.backward_route is None else config.backward_route
    return config.route, back


def _named(route: Route, config: SequenceParallelConfig) -> tuple[Placed, ...] | None:
    """The one route that a config names, as it places it; None for "auto"."""
    if route == AUTO or route is None or isinstance(route, str):
        return None
    return (read_placed(route, config.sequence_parallel_size // config.degrees[0]),)
