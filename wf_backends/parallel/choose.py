"""What the planner is asked for an attention call, and the choice of a config without "auto".

Pure: standard library only. A rank plans once for similar calls: `planner.representative` rounds
lengths up to one of eight values in each octave, and replaces documents by typical ones.
"""

from __future__ import annotations

from typing import Any

from wf_backends._validation import AUTO
from wf_backends.cluster import Topology, one_host
from wf_backends.config import LSS, Route, SequenceParallelConfig
from wf_backends.lowering import Shape
from wf_backends.planner import MOVES, Choice, Request, Workload
from wf_backends.schedule import Mask, Placed, read_placed


def named_choice(request: Request) -> Choice:
    """What an attention call runs by a config without "auto": each field has one value."""
    routes = request.degrees, request.forward, request.backward
    fields: Any = (*routes, request.moves, request.keeps, request.strides, request.chunks)
    return Choice(*(value for (value,) in fields))


def request_of(
    config: SequenceParallelConfig,
    shape: Shape,
    seqlen: int,
    mask: Mask,
    topology: Topology | None = None,
    keys: int | None = None,
) -> Request:
    """The planner's Request for an attention call: all values of what a config leaves to "auto".

    The layout is the config's. If route is "auto" and backward_route is not set, the forward and
    the backward route are chosen separately.

    Args:
        shape: batch, heads and kv_heads before the Ulysses exchange.
        topology: of the sequence-parallel ranks, or of more ranks on the same kind of hosts;
            None = one host of unknown memory.
        keys: the keys' sequence length in cross attention; None = seqlen.
    """
    size, moves, keep = config.sequence_parallel_size, config.backward_moves, config.keep_gathered
    topology = (topology or one_host(size)).with_ranks(size)
    kernel = config.kernel if config.kernel in dict(topology.kernels) else AUTO
    return Request(
        topology,
        Workload(shape, seqlen, mask.within(seqlen), config.layout, kernel, keys),
        degrees=config.degrees,
        strides=_numbers(config.ulysses_stride),
        chunks=_numbers(config.ulysses_chunks),
        forward=_named(config.route, config),
        backward=_named(config.route_of_backward, config),
        moves=MOVES if moves == AUTO else (str(moves),),
        keeps=(False, True) if keep == AUTO else (keep is True or config.strategy == LSS,),
        layers=config.kept_layers,
    )


def _numbers(value: int | str | None) -> tuple[int, ...] | None:
    """The number that a config names, as a tuple; None for "auto"."""
    return None if value == AUTO else (int(value or 1),)


def _named(route: Route, config: SequenceParallelConfig) -> tuple[Placed, ...] | None:
    """The route that a config names, with its placement, as a tuple; None for "auto"."""
    if route is None or isinstance(route, str):
        return None
    return (read_placed(route, config.sequence_parallel_size // config.degrees[0]),)
