"""The plan for a model: of the law's, streaming and the host alone the fastest by simulation."""

from __future__ import annotations

from dataclasses import replace
from math import floor, inf

from wf_backends.weights.jobs import simulate
from wf_backends.weights.law import Rates, WeightUse, best_alpha, residency, seconds_per_byte
from wf_backends.weights.plan import PHASES, Plan, Request, Split

CALLS_OF_COPY = 5  # a copy takes no less than so many times the overhead of a call
SLABS_OF_LARGEST = 4  # slabs that the streamed rows of the largest linear fill


def make_plan(request: Request) -> Plan:
    """The plan whose decoding pass takes the least time; everything resident where that fits.

    Raises:
        ValueError: where slabs of a single row, and what is not split, exceed the accelerator's
            memory, or weights and pinned memory the host's.
    """
    if sum(linear.nbytes for linear in request.linears) <= request.room:
        splits = tuple(Split(linear, linear.rows, 0, 0) for linear in request.linears)
        plan = streaming = Plan(request, splits, slab_bytes=0, slabs=0)
    else:
        _check_room(request)
        streaming = split_plan(request, 0.0)
        shares = (None, 0.0, 1.0) if request.alpha is None else (request.alpha,)
        plan = min((split_plan(request, a) for a in shares), key=decode_seconds)
    if plan.host_bytes > request.host_bytes:
        raise ValueError(
            f'max_memory["cpu"] must be at least {plan.host_bytes} bytes, which the weights that '
            f"are split and pinned memory take; got {request.host_bytes}"
        )
    return replace(
        plan,
        decode_seconds=decode_seconds(plan),
        prefill_seconds=simulate(plan, ["prefill"])[0][0],
        streaming_seconds=decode_seconds(streaming),
        host_seconds=decode_seconds(split_plan(request, 1.0)),
    )


def _check_room(request: Request) -> None:
    need = request.other_bytes + request.slabs * _largest_row(request)
    if need > request.accelerator_bytes:
        raise ValueError(
            f"max_memory[0] must be at least {need} bytes, which what is not split "
            f"({request.other_bytes} bytes) and {request.slabs} slabs of one row take; "
            f"got {request.accelerator_bytes}"
        )


def decode_seconds(plan: Plan) -> float:
    """Of a decoding pass after others."""
    return simulate(plan, ["decode", "decode", "decode"])[0][-1]


def _largest_row(request: Request) -> int:
    return max(linear.row_bytes for linear in request.linears)


def _slab_bytes(request: Request, alpha: float | None) -> int:
    """Whole rows of the largest linear; all slabs together are no more than the memory."""
    rates = request.rates_at(request.linears[0], "decode")
    sizes = [linear.nbytes for linear in request.linears]
    resident = request.room / sum(sizes)
    share = 1 - resident - (best_alpha(resident, rates) if alpha is None else alpha)
    wanted = int(share * max(sizes) / SLABS_OF_LARGEST)
    least = int(CALLS_OF_COPY * rates.call_seconds * rates.link)
    row, most = _largest_row(request), request.room // request.slabs
    return max(row, min(max(wanted, least), most)) // row * row


def split_plan(request: Request, alpha: float | None) -> Plan:
    """The plan with the host's share `alpha` of every linear, or the law's."""
    splits, slab_bytes = list[Split](), _slab_bytes(request, alpha)
    weights = [
        WeightUse(x.nbytes, x.uses(request.decode_tokens), request.rates_at(x, "decode"))
        for x in request.linears
    ]
    shares = residency(weights, max(request.room - request.slabs * slab_bytes, 0), alpha)
    for linear, share in zip(request.linears, shares, strict=True):
        rows = floor(share * linear.rows + 1e-9)
        host = (
            host_rows(linear.rows, rows, request.rates_at(linear, phase), alpha) for phase in PHASES
        )
        splits.append(Split(linear, rows, *(linear.rows - rows - each for each in host)))
    streams = any(split.streamed_decode or split.streamed_prefill for split in splits)
    return Plan(request, tuple(splits), slab_bytes * streams, request.slabs * streams)


def host_rows(rows: int, resident: int, rates: Rates, alpha: float | None) -> int:
    """How many rows the host computes: of whole numbers the best by the law, or near `alpha`."""
    if alpha is not None:
        return min(round(alpha * rows), rows - resident)
    most, both = rows - resident, rates
    if rates.host_beside_link < inf:  # the law with the rates of both at a time, as measured
        both = rates.contended(streams=True, host_works=True)

    def seconds(host: int) -> float:
        return seconds_per_byte(host / rows, resident / rows, both if 0 < host < most else rates)

    best = floor(best_alpha(resident / rows, both) * rows)
    return min({best, min(best + 1, most), most, 0}, key=seconds)
