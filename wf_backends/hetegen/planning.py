"""The plan for a model: of a few sizes of slabs and shares of the host the fastest by simulation.

Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import replace
from math import floor, inf

from wf_backends.hetegen.jobs import Split
from wf_backends.hetegen.law import Rates, WeightUse, best_alpha, residency, seconds_per_byte
from wf_backends.hetegen.plan import Plan, Request

CALLS_OF_COPY = 5  # a copy takes no less than so many times the overhead of a call
SLABS_OF_LARGEST = (1, 2, 4, 8)  # slabs that the streamed rows of the largest linear may fill


def make_plan(request: Request) -> Plan:
    """The plan whose decoding pass takes the least time; everything resident where that fits.

    Raises:
        ValueError: where slabs of a single row, and what is not split, exceed the memory.
    """
    need = request.other_bytes + request.slabs * _largest_row(request)
    if sum(linear.nbytes for linear in request.linears) <= request.room:
        splits = tuple(Split(linear, linear.rows, 0, 0) for linear in request.linears)
        return _with_seconds(Plan(request, splits, slab_bytes=0, slabs=0))
    if need > request.accelerator_bytes:
        raise ValueError(
            f"max_memory[0] must be at least {need} bytes, which what is not split "
            f"({request.other_bytes} bytes) and {request.slabs} slabs of one row take; "
            f"got {request.accelerator_bytes}"
        )
    shares = (None, 0.0, 1.0) if request.alpha is None else (request.alpha,)
    return _with_seconds(min((_fastest(request, a) for a in shares), key=decode_seconds))


def decode_seconds(plan: Plan) -> float:
    """Of a decoding pass after others."""
    return plan.simulate(["decode", "decode", "decode"])[0][-1]


def _with_seconds(plan: Plan) -> Plan:
    """The plan with its predictions, and those of streaming and of the host alone."""
    streaming = plan if plan.fits else _fastest(plan.request, 0.0)
    return replace(
        plan,
        decode_seconds=decode_seconds(plan),
        prefill_seconds=plan.simulate(["prefill"])[0][0],
        streaming_seconds=decode_seconds(streaming),
        host_seconds=decode_seconds(split_plan(plan.request, 1.0, slab_bytes=0)),
    )


def _fastest(request: Request, alpha: float | None) -> Plan:
    """Of slabs of several sizes the fastest plan."""
    plans = (split_plan(request, alpha, size) for size in _slab_sizes(request, alpha))
    return min(plans, key=decode_seconds)


def _largest_row(request: Request) -> int:
    return max(linear.row_bytes for linear in request.linears)


def _slab_sizes(request: Request, alpha: float | None) -> list[int]:
    """From large to small, none of them all of the memory."""
    rates = request.rates.at(request.decode_tokens, request.linears[0].itemsize)
    sizes = [linear.nbytes for linear in request.linears]
    resident = request.room / sum(sizes)
    share = 1 - resident - (best_alpha(resident, rates) if alpha is None else alpha)
    row, most = _largest_row(request), request.room // request.slabs
    least = max(row, int(CALLS_OF_COPY * rates.call_seconds * rates.link))
    pieces = (max(least, int(share * max(sizes) / n)) for n in SLABS_OF_LARGEST)
    return sorted({max(row, min(piece, most)) // row * row for piece in pieces}, reverse=True)


def split_plan(request: Request, alpha: float | None, slab_bytes: int) -> Plan:
    """The plan with slabs of this size, and of the host's share `alpha` or the law's."""
    splits = []
    resident = resident_rows(request, request.room - request.slabs * slab_bytes, alpha)
    for linear, rows in zip(request.linears, resident, strict=True):
        streamed = (
            linear.rows
            - rows
            - host_rows(linear.rows, rows, request.rates.at(tokens, linear.itemsize), alpha)
            for tokens in (request.decode_tokens, request.prefill_tokens)
        )
        splits.append(Split(linear, rows, *streamed))
    streams = any(split.streamed_decode or split.streamed_prefill for split in splits)
    return Plan(request, tuple(splits), slab_bytes * streams, request.slabs * streams)


def resident_rows(request: Request, nbytes: int, alpha: float | None) -> list[int]:
    """`law.residency` in whole rows, which together take at most `nbytes`."""
    linears, tokens = request.linears, request.decode_tokens
    rates = {size: request.rates.at(tokens, size) for size in {x.itemsize for x in linears}}
    weights = [WeightUse(x.nbytes, x.uses(tokens), rates[x.itemsize]) for x in linears]
    shares = residency(weights, max(nbytes, 0), alpha)
    rows = [floor(share * x.rows + 1e-9) for share, x in zip(shares, linears, strict=True)]
    left = nbytes - sum(n * x.row_bytes for n, x in zip(rows, linears, strict=True))
    for i in sorted(range(len(linears)), key=lambda i: -weights[i].saved_per_byte):
        if rows[i] < shares[i] * linears[i].rows - 1e-9 and linears[i].row_bytes <= left:
            rows[i] += 1
            left -= linears[i].row_bytes
    return rows


def host_rows(rows: int, resident: int, rates: Rates, alpha: float | None) -> int:
    """How many rows the host computes: of whole numbers the best by the law, or near `alpha`."""
    if alpha is not None:
        return min(round(alpha * rows), rows - resident)
    if rates.host_beside_link < inf:  # the law with the rates of both at a time, as measured
        rates = rates.contended(streams=True, host_works=True)
    best = best_alpha(resident / rows, rates) * rows
    around = {floor(best), min(floor(best) + 1, rows - resident)}
    return min(around, key=lambda host: seconds_per_byte(host / rows, resident / rows, rates))
