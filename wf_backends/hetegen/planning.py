"""The plan for a model: of a few sizes of slabs and shares of the host the fastest by simulation.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wf_backends.hetegen.law import Rates, Weight, best_alpha
from wf_backends.hetegen.plan import (
    SLABS_OF_LARGEST,
    Linear,
    Plan,
    Split,
    host_rows,
    resident_rows,
    used,
)

CALLS_OF_COPY = 5  # a copy takes no less than so many times the overhead of a call


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for.

    Attributes:
        linears: of the model, in its order.
        rates: of the device, for one token.
        accelerator_bytes: of its memory, for weights and slabs.
        other_bytes: what is not split takes of it.
        decode_tokens, prefill_tokens: in a pass.
        alpha: the host's share of every linear; None for the best.
        prefetch: slabs that may be full while one is filled and one is read.
    """

    linears: tuple[Linear, ...]
    rates: Rates
    accelerator_bytes: int
    other_bytes: int = 0
    decode_tokens: int = 1
    prefill_tokens: int = 512
    alpha: float | None = None
    prefetch: int = 1

    @property
    def slabs(self) -> int:
        return self.prefetch + 2

    @property
    def split_bytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


def make_plan(request: Request) -> Plan:
    """The plan whose decoding pass takes the least time; everything resident where that fits.

    Raises:
        ValueError: where slabs of a single row, and what is not split, exceed the memory.
    """
    if request.other_bytes + request.split_bytes <= request.accelerator_bytes:
        return with_seconds(resident_plan(request), request)
    need = request.other_bytes + request.slabs * largest_row(request)
    if need > request.accelerator_bytes:
        raise ValueError(
            f"max_memory[0] must be at least {need} bytes, which what is not split "
            f"({request.other_bytes} bytes) and {request.slabs} slabs of one row take; "
            f"got {request.accelerator_bytes}"
        )
    shares = (None, 0.0, 1.0) if request.alpha is None else (request.alpha,)
    plans = [plan for alpha in shares for plan in candidates(request, alpha)]
    return with_seconds(min(plans, key=decode_seconds), request)


def largest_row(request: Request) -> int:
    """Bytes of the largest row of any linear."""
    return max(linear.row_bytes for linear in request.linears)


def resident_plan(request: Request) -> Plan:
    """Everything in the accelerator's memory."""
    splits = tuple(Split(linear, linear.rows, 0, 0) for linear in request.linears)
    return _plan(request, splits, 0, 0)


def candidates(request: Request, alpha: float | None) -> Iterator[Plan]:
    """Plans with slabs of several sizes, none of them all of the memory."""
    room = request.accelerator_bytes - request.other_bytes
    rates = request.rates.at(request.decode_tokens, request.linears[0].itemsize)
    resident = room / request.split_bytes
    share = 1 - resident - (best_alpha(resident, rates) if alpha is None else alpha)
    largest = max(linear.nbytes for linear in request.linears)
    row, most = largest_row(request), room // request.slabs
    least = max(row, int(CALLS_OF_COPY * rates.call_seconds * rates.link))
    sizes = {max(row, min(max(least, int(share * largest / n)), most)) for n in SLABS_OF_LARGEST}
    for size in sorted(sizes, reverse=True):
        yield split_plan(request, alpha, size // row * row)


def split_plan(request: Request, alpha: float | None, slab_bytes: int) -> Plan:
    """The plan with slabs of this size, and of the host's share `alpha` or the law's."""
    decode, prefill = request.decode_tokens, request.prefill_tokens
    weights = [
        Weight(x.nbytes, x.uses(decode), request.rates.at(decode, x.itemsize))
        for x in request.linears
    ]
    room = request.accelerator_bytes - request.other_bytes - request.slabs * slab_bytes
    resident = resident_rows(request.linears, weights, room, alpha)
    splits = []
    for linear, rows in zip(request.linears, resident, strict=True):
        streamed = (
            linear.rows
            - rows
            - host_rows(linear.rows, rows, request.rates.at(tokens, linear.itemsize), alpha)
            for tokens in (decode, prefill)
        )
        splits.append(Split(linear, rows, *streamed))
    streams = any(split.streamed_decode or split.streamed_prefill for split in splits)
    return _plan(request, tuple(splits), slab_bytes if streams else 0, request.slabs * streams)


def _plan(request: Request, splits: tuple[Split, ...], slab_bytes: int, slabs: int) -> Plan:
    return Plan(
        splits=splits,
        rates=request.rates,
        decode_tokens=request.decode_tokens,
        prefill_tokens=request.prefill_tokens,
        slab_bytes=slab_bytes,
        slabs=slabs,
        other_bytes=request.other_bytes,
    )


def decode_seconds(plan: Plan) -> float:
    """Of a decoding pass after another one."""
    return plan.simulate(["decode", "decode", "decode"])[0][-1]


def with_seconds(plan: Plan, request: Request) -> Plan:
    """The plan with its predictions, and those of streaming and of the host alone."""
    if plan.slabs or any(split.alpha("decode") for split in plan.splits):
        streaming = min(map(decode_seconds, candidates(request, 0.0)))
    else:
        streaming = decode_seconds(plan)
    return replace(
        plan,
        decode_seconds=decode_seconds(plan),
        prefill_seconds=plan.simulate(["prefill"])[0][0],
        streaming_seconds=streaming,
        host_seconds=host_seconds(request.linears, request.rates, request.decode_tokens),
    )


def host_seconds(linears: Sequence[Linear], rates: Rates, tokens: int) -> float:
    """Of a pass in which the host computes everything."""
    calls = [linears[i] for i in used(linears, tokens)]
    seconds = 0.0
    for linear in calls:
        at = rates.at(tokens, linear.itemsize).contended(streams=False, host_works=True)
        seconds += linear.nbytes / at.host + rates.call_seconds
    return seconds
